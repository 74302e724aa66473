"""Adapters put into a module: what they start with, what the module is without them, and what is refused."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.config.lora_keys import LoraKeys
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.lora.adapter_size import adapter_size
from hybrid_rl.models.lora.factors import adapter_shapes, low_rank_changes
from hybrid_rl.models.lora.inject import init_adapters, inject, is_adapter_name, leave
from hybrid_rl.models.lora.peft_config import peft_config_of
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.training.sharding.build import build_model
from hybrid_rl.weights.boxes import local_box
from hybrid_rl.weights.plain import is_adapted, plain, running
from hybrid_rl.weights.sources import ObjectSource
from tests.unit.models.families import build
from tests.unit.training.lora_case import config_of, give_values

TOKENS, LENGTHS, TARGETS = torch.arange(2, 14), [7, 5], torch.tensor([1, 4, 6, 8, 11])
ALL = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA, some whole": ("qwen2", {**ALL, "use_dora": True, "modules_to_save": ["lm_head", "model.norm"]}),
    "DoRA of transposed layers": ("gpt2", {**ALL, "use_dora": True}),
    "experts": ("qwen3-moe", ALL),
}


def logprobs(module: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return CausalLM(module).packed_logprobs(TOKENS, LENGTHS, TARGETS, 1.0)[0]


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("form", FORMS)
def test_fresh_adapters_change_nothing_and_are_the_same_however_the_module_came(form: str) -> None:
    """From a live module, and built from a recipe on meta."""
    family, keys = FORMS[form]
    base = build(family)
    recipe = ModelRecipe.of_module(base, ObjectSource.of(base, lambda data: data))
    expected = logprobs(base)
    here = RankContext(device=torch.device("cpu"))
    config = config_of(keys, dtype="float32")
    built = [build_model(model, config, here, is_trained=True).module for model in (base, recipe)]
    assert built[0] is base
    first, second = map(snapshot, built)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    for module in built:
        assert {name for name, p in module.named_parameters() if p.requires_grad} == {
            name for name, _ in module.named_parameters() if is_adapter_name(name)
        }
        torch.testing.assert_close(logprobs(module), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_inside_plain_a_module_is_what_it_was(form: str) -> None:
    """And with what is trained whole, unless that is left out too."""
    family, keys = FORMS[form]
    module = build(family)
    before, expected = snapshot(module), logprobs(module)
    model = CausalLM(module)
    inject(module, peft_config_of(keys))
    give_values(module)
    adapted = logprobs(module)
    assert (adapted - expected).abs().max() > 1e-2
    names = list(module.state_dict())
    with plain(module, trained=False), torch.no_grad():
        now = snapshot(module)
        assert list(now) == list(before) and all(torch.equal(now[name], before[name]) for name in before)
        assert not is_adapted(module)
        assert torch.equal(model.packed_logprobs(TOKENS, LENGTHS, TARGETS, 1.0)[0], expected)
    with plain(module):
        changed = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    whole = keys.get("modules_to_save", [])
    assert {name.removesuffix(".weight") for name in changed} == set(whole)
    assert list(module.state_dict()) == names and torch.equal(logprobs(module), adapted)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a layer that is not there": ("qwen2", {"target_modules": ["c_attn"]}, "lora: Target modules .*c_attn.* not found"),
    "the head": ("qwen2", {"target_modules": ["q_proj", "lm_head"]}, "names lm_head, the head: adapters are not"),
    "an embedding": (
        "llama",
        {"target_modules": ["embed_tokens"]},
        "names model.embed_tokens, which is a Embedding.*or train it whole with lora.peft.modules_to_save",
    ),
    "an embedding that is the head": (
        "gemma2",
        {"target_modules": ["embed_tokens"]},
        "names model.embed_tokens, which is a Gemma2.*Leave it out or, as this model .* train all weights",
    ),
    "one of two that are tied": ("gemma2", {"modules_to_save": ["lm_head"]}, "names lm_head, but this model's head is"),
    "the other": ("gemma2", {"modules_to_save": ["embed_tokens"]}, "names model.embed_tokens, but this model's head"),
    "the router of Llama 4": (
        "llama4",
        ALL,
        r"feed_forward.router, a router .*\(peft.exclude_modules=\[router\]\), or give",
    ),
    "that of Phi-3.5-MoE": (
        "phimoe",
        ALL,
        r"mlp.router, a router .*target_parameters=\[router.weight\] besides\)",
    ),
    "DoRA of experts": (
        "qwen3-moe",
        {"target_modules": "all-linear", "use_dora": True},
        "use_dora .* routers and fused experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_the_module_as_it_was(case: str) -> None:
    family, keys, message = REFUSED[case]
    module = build(family)
    next(iter(module.parameters())).requires_grad_(False)
    before, trainable = snapshot(module), [p.requires_grad for p in module.parameters()]
    with pytest.raises(ConfigError, match=message):
        inject(module, peft_config_of(vars(LoraKeys(r=4)) | keys))
    now = snapshot(module)
    assert list(now) == list(before) and not hasattr(module, "peft_config")
    assert [p.requires_grad for p in module.parameters()] == trainable
    inject(module, peft_config_of({"r": 2, "target_modules": ["q_proj"]}))
    with pytest.raises(ModelError, match="has adapters already"):
        inject(module, peft_config_of({"r": 2, "target_modules": ["q_proj"]}))


@pytest.mark.parametrize("family", ["llama4", "phimoe"])
def test_a_router_that_gives_more_than_its_product_is_adapted_by_its_weight(family: str) -> None:
    """As the refusal says: the model with the adapter is the model whose router has the changed weight."""
    keys = {**ALL, "exclude_modules": ["router"]}
    module, parts = build(family), {"target_parameters": ["router.weight"]}
    for rest in ({}, parts):
        other = build(family)
        inject(other, peft_config_of(keys | rest))
        assert any("router" in name for name in adapter_shapes(other)) == bool(rest)
    init_adapters(other, 0)
    expected = logprobs(module)
    assert torch.equal(logprobs(other), expected)
    for name, parameter in other.named_parameters():
        if "router" in name and ".lora_B." in name:
            parameter.data.copy_(
                torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
            )  # not the same for all experts
    with torch.no_grad():
        for name, change in low_rank_changes(other, torch.float32).items():
            weight = module.get_parameter(name)
            weight.copy_(change.merged(weight, local_box(weight)))
    assert not torch.equal(logprobs(module), expected)
    torch.testing.assert_close(logprobs(other), logprobs(module))


EXCLUDED: dict[str, tuple[list[str] | str, set[str]]] = {
    "the router": (["gate"], {"experts.down_proj", "experts.gate_up_proj"}),
    "the experts": (["mlp.experts"], {"gate.weight"}),
    "one parameter": (["down_proj"], {"experts.gate_up_proj", "gate.weight"}),
    "all, of one layer": (
        r".*layers\.0\.mlp\..*",
        {"1.mlp.experts.down_proj", "1.mlp.experts.gate_up_proj", "1.mlp.gate.weight"},
    ),
}


@pytest.mark.filterwarnings("ignore:The following .* did not match", "ignore:You have passed exclude_modules")
@pytest.mark.parametrize("case", EXCLUDED)
def test_routers_and_experts_can_be_excluded(case: str) -> None:
    """peft makes them parameters to be targeted, and excludes modules only. Its config must say the same: the folder of
    an adapter is read by it."""
    excluded, left = EXCLUDED[case]
    module, again = build("qwen3-moe"), build("qwen3-moe")
    keys = {**ALL, "exclude_modules": excluded, "rank_pattern": {"q_proj": 2}}
    adapter_size(module, peft_config_of(keys))  # which checks names
    settings = peft_config_of(keys)
    inject(module, settings)
    found = {name for name in adapter_shapes(module) if "attn" not in name}
    assert found == {name for name, _ in again.named_parameters() if any(name.endswith(end) for end in left)}
    assert adapter_shapes(module)["model.layers.0.self_attn.q_proj.weight"].rank == 2
    peft.inject_adapter_in_model(copy.deepcopy(settings), again)
    assert adapter_shapes(again) == adapter_shapes(module)
    named = peft_config_of({**ALL, "exclude_modules": ["gate"], "target_parameters": ["gate.weight"]})
    inject(module := build("qwen3-moe"), named)
    assert "model.layers.0.mlp.gate.weight" in adapter_shapes(module)


def test_a_seed_draws_each_tensor_alone() -> None:
    """Two layers of one shape differ, and a layer more does not change the others."""
    drawn = []
    for layers in (["q_proj"], ["q_proj", "o_proj"]):
        module = build("llama")
        inject(module, peft_config_of({"r": 4, "target_modules": layers}))
        init_adapters(module, seed=3)
        drawn.append({name: p for name, p in module.named_parameters() if ".lora_A." in name})
    few, many = drawn
    assert few.keys() < many.keys() and all(torch.equal(few[name], many[name]) for name in few)
    values = [*few.values()]
    assert not torch.equal(values[0], values[1])
    bound = 32**-0.5  # of nn.Linear with 32 inputs
    assert all(bound / 2 < p.abs().max().item() <= bound for p in values)


@pytest.mark.parametrize("is_trained", [False, True])
def test_what_was_trained_whole_stays_in_the_module_even_if_no_adapter_learned(is_trained: bool) -> None:
    module = build("qwen2")
    inject(module, peft_config_of({**ALL, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}))
    init_adapters(module, seed=0)
    if is_trained:
        with torch.no_grad():
            running(module.get_output_embeddings()).weight[0, 0] += 1.0
    expected = logprobs(module)
    leave(module)
    assert is_adapted(module) == is_trained and torch.equal(logprobs(module), expected)
