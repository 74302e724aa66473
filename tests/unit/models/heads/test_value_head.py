"""Critics over real architectures: the backbone of the policy, a head, and the class's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from hybrid_rl.batch import Jagged
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.heads.value_head import value_model_class, value_model_of, value_model_on_meta
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.models.saving import save_weights
from hybrid_rl.weights.loading import load_weights
from hybrid_rl.weights.sources import ObjectSource, StateSource, named_state
from tests.support.float64 import KeepFloat64
from tests.unit.models.checkpoints import MODELS, build_stored, rewrite
from tests.unit.models.families import SUPPORTED, VOCABULARY, build

# Families whose checkpoints transformers' own AutoModelForTokenClassification reads.
KNOWN = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2", "phi", *MODELS)
PROMPTS = ([5, 6, 7], [5, 6, 7], [9], [30, 31, 32, 33], [5, 6, 7], [9], [9])  # three are shared, and three more
COMPLETIONS = ([11, 12, 13, 14], [15], [16, 17], [], [11, 12, 13, 14], [16, 18], [16, 17])


def load_value_model(path: str) -> PreTrainedModel:
    """A critic from a saved critic, or from a language model."""
    module, source = value_model_on_meta(ModelRecipe.of_folder(path), torch.float32)
    load_weights(module, source, "cpu")
    return module


def head_of(module: PreTrainedModel) -> nn.Linear:
    found = [child for child in module.children() if isinstance(child, nn.Linear)]
    assert len(found) == 1
    return found[0]


def give_head(module: PreTrainedModel) -> PreTrainedModel:
    """A head that shows everything below it."""
    with torch.no_grad():
        for parameter in head_of(module).parameters():
            parameter.normal_()
    return module


def same(mine: nn.Module, theirs: nn.Module) -> bool:
    a, b = mine.state_dict(), theirs.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def row_of(model: CausalLM) -> PackedRow:
    prompts, completions = (Jagged.from_rows(rows, torch.int64) for rows in (PROMPTS, COMPLETIONS))
    return PackedRow.of(prompts, completions, model.device)


def plain_values(module: PreTrainedModel) -> torch.Tensor:
    """One unpadded forward of the class itself per sample: the number at the place before each completion token."""
    parts = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logits = module(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0, :, 0]
        parts.append(logits[len(prompt) - 1 : len(prompt) + len(completion) - 1])
    return torch.cat(parts)


@pytest.mark.parametrize("name", SUPPORTED)
def test_values_and_gradients_are_those_of_the_class_itself_at_the_place_before_each_token(name: str) -> None:
    module = give_head(value_model_of(build(name, dtype=torch.float64)))
    model = CausalLM(module)
    with KeepFloat64():
        mine, expected = model.row_values(row_of(model)), plain_values(module)
    assert mine.dtype == torch.float64 and mine.shape == (15,)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    direction = torch.linspace(-1, 1, 15, dtype=torch.float64)
    parameters = dict(module.named_parameters())
    gradients = [torch.autograd.grad((v * direction).sum(), list(parameters.values())) for v in (mine, expected)]
    scale = max(float(gradient.abs().max()) for gradient in gradients[1])
    for key, found, wanted in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11 * scale, msg=lambda m, k=key: f"{k}: {m}")


def test_values_of_a_bfloat16_model_are_not_rounded_to_it() -> None:
    module = give_head(value_model_of(build("qwen2", dtype=torch.bfloat16)))
    model = CausalLM(module)
    row = row_of(model)
    values = model.row_values(row)
    context = model.attention.context(row.layout, model.device)
    hidden = model.hidden_states(row.token_ids, row.positions, context)[row.sources]
    expected = (hidden.double() * head_of(module).weight.double()).sum(1) + head_of(module).bias.double()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    assert (values.bfloat16().float() != values).any()


@pytest.mark.parametrize("name", [*SUPPORTED, *MODELS])
def test_a_critic_has_the_policys_backbone_and_a_head_of_zeros_and_leaves_the_policy_alone(name: str) -> None:
    policy = build_stored(name)
    before = {key: tensor.clone() for key, tensor in policy.state_dict().items()}
    critic = value_model_of(policy)
    assert type(critic).__name__.endswith("ForTokenClassification")
    assert same(critic.base_model, policy.base_model)
    assert not any(parameter.any() for parameter in head_of(critic).parameters())
    assert head_of(critic).weight.shape[0] == critic.config.num_labels == 1
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1)
    assert all(torch.equal(before[key], tensor) for key, tensor in policy.state_dict().items())
    assert policy.config.num_labels == 2  # transformers' default


@pytest.mark.parametrize("name", [*SUPPORTED, "qwen3-moe", "mixtral", "deepseek-v3"])
def test_supported_families_pass_verification(name: str) -> None:
    """In mixtures each pass of a router is recorded once, or tokens would get the experts of others."""
    critic = value_model_of(build(name))
    assert 0 < CausalLM(critic).verify() < 2e-6  # of the hidden states: a head of zeros shows nothing
    assert 0 < CausalLM(give_head(critic)).verify() < 2e-6


@pytest.mark.parametrize("name", ["attention sinks", "position in the mask", "convolutions", "an encoder"])
def test_a_backbone_that_cannot_run_packed_is_refused_under_a_head_of_zeros_too(name: str) -> None:
    with pytest.raises(ModelError):
        CausalLM(value_model_of(build(name))).verify()


def test_a_head_that_is_not_the_plain_one_is_refused() -> None:
    module = give_head(value_model_of(build("qwen2")))
    head_of(module).register_forward_hook(lambda *arguments: 2 * arguments[-1])
    with pytest.raises(ModelError, match="gives other logits"):
        CausalLM(module).verify()


def test_what_was_changed_on_a_live_module_and_what_it_freezes_goes_over() -> None:
    policy = build("qwen2")
    policy.model.layers[0].mlp.act_fn = nn.Tanh()
    policy.model.embed_tokens.requires_grad_(False)
    critic = value_model_of(policy)
    assert isinstance(critic.model.layers[0].mlp.act_fn, nn.Tanh)
    frozen = [name for name, parameter in critic.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]
    critic = give_head(critic)
    assert same(value_model_of(critic), critic)  # a critic that is handed over keeps its head


# ------------------------------------------------------------------------------------------------------- files


def labelled(name: str, num_labels: int) -> Any:
    config = build(name).config
    config.num_labels = num_labels
    return config


def folder_of(module: PreTrainedModel, folder: Path) -> str:
    save_weights(module, folder, torch.float32)
    return str(folder)


OFTEN = ("qwen2", "gemma2", "gpt2", "phi", *MODELS)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.sweep) for name in [*SUPPORTED, *MODELS]]
)
def test_a_folder_of_a_language_model_gives_its_backbone_and_one_of_a_critic_the_head_too(
    name: str, tmp_path: Path
) -> None:
    policy = build_stored(name)
    critic = load_value_model(folder_of(policy, tmp_path / "policy"))
    assert same(critic, value_model_of(policy))
    give_head(critic)
    folder = folder_of(critic, tmp_path / "critic")
    assert same(load_value_model(folder), critic)
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["architectures"] == [type(critic).__name__]
    if name in KNOWN:
        loaded: Any = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
        assert not loaded[1]["missing_keys"] and not loaded[1]["unexpected_keys"]
        assert same(loaded[0], critic)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_a_reward_model_gives_backbone_and_head(name: str, tmp_path: Path) -> None:
    reward_model = AutoModelForSequenceClassification.from_config(labelled(name, 1))
    reward_model.save_pretrained(tmp_path / "reward")
    if name == "gpt2":  # its head is called `score` there, `classifier` in the critic: not one head by accident
        with pytest.raises(ModelError, match=r"unexpected keys, e\.g\. score\.weight"):
            load_value_model(str(tmp_path / "reward"))
        with pytest.raises(ModelError, match=r"GPT2ForTokenClassification has no place for its score\.weight"):
            value_model_of(reward_model)
        return
    critic = load_value_model(str(tmp_path / "reward"))
    assert same(value_model_of(reward_model), critic)
    assert same(critic.base_model, reward_model.base_model)
    assert torch.equal(head_of(critic).weight, reward_model.score.weight) and not head_of(critic).bias.any()


def test_a_head_of_several_numbers_is_refused(tmp_path: Path) -> None:
    model = AutoModelForTokenClassification.from_config(labelled("qwen2", 3))
    folder = folder_of(model, tmp_path / "labels")
    with pytest.raises(ModelError, match=r"its score\.weight is \[3, 32\], not \[1, 32\]"):
        value_model_of(model)
    with pytest.raises(ModelError, match=r"mismatched keys.*score\.weight \(checkpoint \[3, 32\], model \[1, 32\]\)"):
        load_value_model(folder)


def test_a_folder_of_a_backbone_alone(tmp_path: Path) -> None:
    policy = build("qwen2")
    policy.model.save_pretrained(tmp_path / "backbone")
    assert same(load_value_model(str(tmp_path / "backbone")), value_model_of(policy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), r"missing keys, e\.g\. model\.norm\.weight"),
        (lambda state: state.update({"v_head.weight": torch.ones(1)}), r"unexpected keys, e\.g\. v_head"),
        (
            lambda state: state.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}),
            r"unexpected keys, e\.g\. model\.layers\.2",
        ),
    ],
    ids=["missing", "left over", "a layer more"],
)
def test_a_folder_that_does_not_fit_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    folder = folder_of(build("qwen2"), tmp_path / "model")
    rewrite(tmp_path / "model", change)
    with pytest.raises(ModelError, match=message):
        load_value_model(folder)


# --------------------------------------------------------------------------------------------- recipes of live modules


def loaded(recipe: ModelRecipe) -> PreTrainedModel:
    module, source = value_model_on_meta(recipe, torch.float32)
    assert all(parameter.is_meta for parameter in module.parameters())
    load_weights(module, source, "cpu")
    return module


@pytest.mark.parametrize("name", ["qwen2 tied", "qwen3 moe", "gpt2", "granite"])
def test_a_recipe_of_a_live_policy_in_a_store(name: str) -> None:
    policy = build_stored(name)
    policy.get_input_embeddings().requires_grad_(False)
    store: list[np.ndarray] = []
    source = ObjectSource.of(policy, lambda data: store.append(data) or len(store) - 1)
    source.get = store.__getitem__
    critic = loaded(ModelRecipe.of_module(policy, source))
    assert same(critic, value_model_of(policy))
    assert [n for n, p in critic.named_parameters() if not p.requires_grad] == [
        n for n, p in policy.named_parameters() if not p.requires_grad
    ]


def test_a_recipe_of_a_live_critic_keeps_its_head() -> None:
    critic = give_head(value_model_of(build("granite")))
    assert same(loaded(ModelRecipe.of_module(critic, StateSource(named_state(critic)))), critic)


def test_of_tied_weights_the_heads_name_alone_will_do() -> None:
    policy = build_stored("qwen2 tied")
    state = named_state(policy)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    assert same(loaded(ModelRecipe.of_module(policy, StateSource(state))), value_model_of(policy))


# ---------------------------------------------------------------------------------------------------------- classes


class Unrelated(transformers.Qwen2PreTrainedModel):
    """A language model with a separate backbone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Embedding(VOCABULARY, 8)
        self.lm_head = nn.Linear(8, VOCABULARY)
        self.post_init()


def test_a_class_over_a_backbone_of_its_own_is_refused_with_what_to_do() -> None:
    config = build("qwen2").config
    with pytest.raises(ModelError, match="Unrelated cannot be given a value head: its backbone is a Embedding.*set cr"):
        value_model_of(Unrelated(config))
    with pytest.raises(ModelError, match="T5ForConditionalGeneration cannot be given a value head"):
        value_model_of(build("encoder and decoder"))


def test_a_subclass_of_a_known_class_is_not() -> None:
    class Mine(transformers.Qwen2ForCausalLM):
        pass

    assert type(value_model_of(Mine(build("qwen2").config))).__name__ == "Qwen2ForTokenClassification"


def test_the_class_of_a_family_is_one() -> None:
    first, second = (value_model_class(build("granite", hidden_size=size)) for size in (32, 64))
    assert first is second and first.__name__ == "GraniteForTokenClassification"


def test_a_policy_is_no_critic_and_the_other_way_round() -> None:
    policy, critic = CausalLM(build("qwen2")), CausalLM(value_model_of(build("qwen2")))
    assert policy.is_language_model and not critic.is_language_model
    with pytest.raises(ModelError, match=f"gives {policy.vocab_size} numbers, not one"):
        policy.row_values(row_of(policy))
