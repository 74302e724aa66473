"""The start-up check: faults that it finds, also those that only long sequences would show, and its messages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hybrid_rl.compat.torch import forward_pre_hooks
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.attention.attention_function import AttentionOptions, options_of
from hybrid_rl.models.attention.survey import LayerCall
from hybrid_rl.models.experts.routing import HeldRouting, find_routers
from hybrid_rl.models.packed.classifier import verify_scores
from hybrid_rl.models.packed.startup_check import VERIFY_LAYOUT, VERIFY_TOLERANCE, verify_row
from hybrid_rl.models.row import Layout
from tests.support.libraries.torch_names import forward_hooks
from tests.unit.models.checkpoints import build_stored
from tests.unit.models.families import BASE, EXPERTS, GROUPED, LATENT, REFUSED, SHARED, VOCABULARY, build, made


def of_kind(kind: str, **settings: Any) -> PreTrainedModel:
    """A model of a family by the name of its classes."""
    config = f"{kind}TextConfig" if hasattr(transformers, f"{kind}TextConfig") else f"{kind}Config"
    return made(config, BASE | settings)


def gap_at(model: CausalLM, length: int) -> float:
    """Largest difference of packed logits from the module's own, for one sample of that length after another."""
    token_ids = torch.randint(2, VOCABULARY, (4 + length,), generator=torch.Generator().manual_seed(1))
    layout = Layout((4, length))
    context = model.attention.context(layout, model.device)
    with torch.no_grad():
        found = model.logits(model.hidden_states(token_ids, layout.positions(), context))[4:]
        expected = model.module(input_ids=token_ids[None, 4:], use_cache=False).logits[0]
    return float((found - expected).abs().max() / expected.abs().max())


# Windows and chunks that stand in the mask alone: attention is not told of them.
MASK_ONLY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2-moe": (
        "Qwen2Moe",
        "sliding_window",
        SHARED | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "max_window_layers": 0},
    ),
    "phimoe": ("Phimoe", "sliding_window", EXPERTS),
    "llama-4": (
        "Llama4",
        "attention_chunk_size",
        EXPERTS
        | {"attn_temperature_tuning": False, "head_dim": 8, "intermediate_size_mlp": 48}
        | {"layer_types": ["chunked_attention", "full_attention"]},
    ),
}


def mask_only(name: str, reach: int) -> PreTrainedModel:
    kind, key, settings = MASK_ONLY[name]
    return of_kind(kind, **settings, **{key: reach})


@pytest.mark.parametrize("name", MASK_ONLY)
def test_what_stands_in_the_mask_alone_limits_the_length(name: str) -> None:
    """The check's own sequences are shorter than the window; and the limit is the one at which numbers go wrong."""
    model = CausalLM(mask_only(name, 16))
    model.verify()
    assert model.length_limit is not None and model.length_limit.num_tokens == 16
    assert gap_at(model, 16) < 1e-4 < 1e-2 < gap_at(model, 17)
    model.check_length(16)
    with pytest.raises(ModelError, match=r"more than 16 tokens .* asks for no window.*(sliding_window|chunk_size)=16"):
        model.check_length(17)


@pytest.mark.parametrize("name", MASK_ONLY)
def test_a_reach_that_no_sequence_exceeds_is_none(name: str) -> None:
    model = CausalLM(mask_only(name, 64))
    model.verify()
    assert model.length_limit is not None and model.length_limit.why == "the model has 64 positions"


@pytest.mark.parametrize("name", MASK_ONLY)
def test_a_reach_of_a_few_tokens_is_refused_at_once(name: str) -> None:
    with pytest.raises(ModelError, match="asks for no window, but the model's own mask ends elsewhere"):
        CausalLM(mask_only(name, 4)).verify()


@pytest.mark.parametrize("kind", ["Mistral", "Gemma3", "Cohere2"])
def test_windows_that_layers_ask_for_are_no_limit(kind: str) -> None:
    """As long as released ones, and a hundred thousand positions: the check costs as much as for short ones."""
    model = CausalLM(of_kind(kind, sliding_window=4096, max_position_embeddings=131072, head_dim=8))
    lengths: list[int] = []
    embeddings = model.module.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda _, args, __: lengths.append(args[0].numel()))
    model.verify()
    handle.remove()
    assert sum(lengths) <= 50 and len(lengths) == 5
    assert model.masked_from is None
    model.check_length(131072)


def rule_of(window: int | None = None, chunk: int | None = None) -> Any:
    def rule(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = key <= query
        seen &= torch.ones_like(seen) if window is None else query - key < window
        return seen & (torch.ones_like(seen) if chunk is None else query // chunk == key // chunk)

    return rule


@pytest.mark.parametrize("reach", [1, 2, 3, 7, 16, 17, 1000, 4096, 8192, 65535])
def test_the_first_position_that_differs(reach: int) -> None:
    """A window or chunk of R hides the first token of all from position R on, whatever the other one is."""
    for rule in (rule_of(window=reach), rule_of(chunk=reach)):
        assert LayerCall(0, "A", AttentionOptions(), rule).first_difference(131072) == reach
        assert LayerCall(0, "A", AttentionOptions(), rule).first_difference(reach) is None
    same = LayerCall(0, "A", AttentionOptions(window=reach), rule_of(window=reach))
    assert same.first_difference(131072) is None
    for other in (reach + 1, 2 * reach, 70000):
        call = LayerCall(0, "A", AttentionOptions(window=reach), rule_of(window=other))
        assert call.first_difference(131072) == reach
        call = LayerCall(0, "A", AttentionOptions(window=other), rule_of(window=reach))
        assert call.first_difference(131072) == reach
    call = LayerCall(0, "A", AttentionOptions(window=reach), rule_of())
    assert call.first_difference(131072) == reach


def test_a_mask_that_shows_what_comes_after_differs_from_the_first_token_on() -> None:
    call = LayerCall(0, "A", AttentionOptions(), lambda *index: torch.ones_like(index[2], dtype=torch.bool))
    assert call.first_difference(64) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_tells_its_reason(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match=REFUSED[name].message):
        CausalLM(build(name, dtype=dtype)).verify()


def test_a_keyword_that_nobody_knows_is_refused_unless_it_says_nothing() -> None:
    module = torch.nn.Module()
    module.layer_idx = 3
    known = {"scaling": 0.5, "dropout": 0.0, "sliding_window": 7, "block_indices": None, "output_attentions": False}
    assert options_of(module, known) == (3, AttentionOptions(scale=0.5, window=7))
    with pytest.raises(ModelError, match="hands 'block_indices'"):
        options_of(module, known | {"block_indices": torch.zeros(1)})


def many_experts(seed: int) -> PreTrainedModel:
    experts = {"n_routed_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 8, "n_group": 4, "topk_group": 2}
    settings = BASE | GROUPED | LATENT | experts | {"num_hidden_layers": 6}
    return made("DeepseekV3Config", settings, dtype=torch.bfloat16, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_experts_in_bfloat16_that_are_chosen_otherwise_by_rounding_are_no_fault(seed: int) -> None:
    assert CausalLM(many_experts(seed)).verify() < 0.1


@pytest.mark.parametrize("name", ["mixtral", "deepseek v3"])
def test_a_router_whose_scores_depend_on_the_row_is_found(name: str) -> None:
    """Experts are held: their router's scores are compared themselves."""
    module = build_stored(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.3)
    router = find_routers(module)[0][0]
    weight = router.weight.detach().clone()

    def otherwise_when_packed(child: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        is_packed = args[0].shape[:-1].numel() not in (2, 5, 8, 9)
        child.weight.data.copy_(-weight if is_packed else weight)

    router.register_forward_pre_hook(otherwise_when_packed)
    with pytest.raises(ModelError, match="gives other router scores with packed sequences"):
        CausalLM(module).verify()


def test_experts_that_compute_otherwise_when_packed_are_found() -> None:
    module = build_stored("mixtral")
    for child in module.modules():
        if type(child).__name__ == "MixtralExperts":
            child.register_forward_hook(
                lambda _, args, output: output * (1.5 if args[0].shape[0] == VERIFY_LAYOUT.num_tokens else 1.0)
            )
    with pytest.raises(ModelError, match="gives other logits"):
        CausalLM(module).verify()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in which blocks start from equal numbers
def test_the_check_leaves_no_hook_and_changes_no_weight(dtype: torch.dtype) -> None:
    module = build_stored("mixtral").to(dtype)
    before = copy.deepcopy(module.state_dict())
    CausalLM(module).verify()
    assert not any(forward_hooks(child) or forward_pre_hooks(child) for child in module.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_reward_models_are_checked_in_the_same_way() -> None:
    config = transformers.Qwen2MoeConfig(
        **(BASE | EXPERTS | {"num_experts": 64, "num_experts_per_tok": 8}),
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention"] * 2,
        shared_expert_intermediate_size=16,
        num_labels=1,
    )
    for dtype in (torch.float32, torch.bfloat16):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = CausalLM(transformers.Qwen2MoeForSequenceClassification(config).to(dtype))
        assert verify_scores(model) < VERIFY_TOLERANCE[dtype]
        assert model.length_limit is not None and model.length_limit.num_tokens == 16


def test_routers_that_sort_the_tokens_of_a_pass_are_left_to_themselves() -> None:
    model = CausalLM(of_kind("JetMoe", **EXPERTS, kv_channels=8))
    assert model.verify() < 1e-3
    routing = HeldRouting(model.module)
    with torch.no_grad(), routing.recording():
        model.module(input_ids=torch.arange(2, 8)[None])
    assert routing.num_free and not routing.gaps(torch.arange(2))


def test_a_gap_tells_of_routers_that_cannot_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_rl.models.packed.startup_check.VERIFY_TOLERANCE", {torch.bfloat16: 0.0})
    with pytest.raises(ModelError, match="routers decide again in every pass.*dtype=float32"):
        CausalLM(of_kind("JetMoe", **EXPERTS, kv_channels=8).bfloat16()).verify()


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_the_filler_and_shared_prompts_are_checked(name: str) -> None:
    row = verify_row(CausalLM(build(name)))
    assert row.layout.children and len(row.layout.roots) > row.layout.num_shared + 1


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("attention", ["auto", "unpacked"])
def test_weights_that_are_no_numbers_are_named_and_not_the_architecture(attention: str, wrong: float) -> None:
    module = build("qwen2")
    module.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 5] = wrong
    message = (
        r"^1 of \d+ weights of Qwen2ForCausalLM are not finite, first model.layers.1.mlp.up_proj.weight:.*checkpoint$"
    )
    with pytest.raises(ModelError, match=message):
        CausalLM(module, attention).verify()


def test_so_are_those_of_a_reward_model() -> None:
    with torch.random.fork_rng(devices=[]):
        model = transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**BASE, num_labels=1)).eval()
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ModelError, match="^1 of .* are not finite, first model.norm.weight"):
        verify_scores(CausalLM(model))
