from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from hybrid_rl.compat.torch import storage_id
from hybrid_rl.errors import ConfigError, HandoffError
from hybrid_rl.extras.plan.handoff_plan import plan_handoff
from hybrid_rl.extras.plan.request import Machine, planned_config
from hybrid_rl.extras.plan.trace_files import is_same
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.vllm import meta
from hybrid_rl.vllm.loader import check_reloadable, trace_model
from hybrid_rl.vllm.meta import stand_in_model, trace_on_meta, views_on_meta
from hybrid_rl.weights.views import checkpoint_views
from tests.vllm.live import write_by

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE = {**SIZE, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 64}
EXPERTS = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # what vLLM's attention can do
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
MODELS: dict[str, tuple[PreTrainedConfig, str]] = {
    "tied": (Qwen2Config(**SHAPE, tie_word_embeddings=True), "Qwen2ForCausalLM"),
    "qwen2": (Qwen2Config(**SHAPE, tie_word_embeddings=False), "Qwen2ForCausalLM"),
    "llama": (LlamaConfig(**SHAPE), "LlamaForCausalLM"),
    "gemma2": (Gemma2Config(**SHAPE, head_dim=32), "Gemma2ForCausalLM"),
    "qwen3-moe": (Qwen3MoeConfig(**SHAPE, **EXPERTS), "Qwen3MoeForCausalLM"),
    "deepseek-v3": (DeepseekV3Config(**{**SHAPE, "num_key_value_heads": 4}, **MLA), "DeepseekV3ForCausalLM"),
}
# The inner size is what vLLM's own code takes for granted.
PHI = PhiConfig(**{**SHAPE, "num_key_value_heads": 4, "intermediate_size": 4 * 64})


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "rank", "size"), [*((name, 1, 2) for name in MODELS), ("tied", 0, 1), ("llama", 0, 2)]
)
def test_the_trace_writes_what_vllm_loads(name: str, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, architecture = MODELS[name]
    if name == "deepseek-v3" and current_platform.is_cpu() and not hasattr(AttentionBackendEnum, "CPU_MLA"):
        # On CPUs vLLM 0.25.1 has no attention over latents. It loads the same weights for plain attention.
        with (
            pytest.raises(NotImplementedError, match="MLA is not supported on CPU"),
            stand_in_model(config, architecture, rank, size, torch.bfloat16, "cpu"),
        ):
            pass
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {key: torch.randn(tensor.shape) for key, tensor in module.state_dict().items()}
    views = checkpoint_views(module)
    owners = {storage_id(tensor): weights[key] for key, tensor in views.tensors.items()}
    checkpoint = [
        (key, owners[storage_id(view)].as_strided(view.shape, view.stride(), view.storage_offset()))
        for key, view in views.views
    ]
    with stand_in_model(config, architecture, rank, size, torch.bfloat16, "cpu") as model:
        before = {key: tensor.data_ptr() for key, tensor in model.state_dict().items()}
        for tensor in model.state_dict().values():
            tensor.fill_(-7)
        trace = trace_model(model, views)
        live: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        destinations = [live[spec.name] for spec in trace.destinations]
        assert all(bool((tensor == -7).all()) for tensor in destinations)
        model.load_weights(iter(checkpoint))
        wanted = [tensor.clone() for tensor in destinations]
        for tensor in destinations:
            tensor.fill_(-7)
        write_by(trace, weights, destinations)
        assert {key: tensor.data_ptr() for key, tensor in model.state_dict().items()} == before
    assert trace.untraced == {}
    assert trace.unused == ()
    assert {spec.name for spec in trace.destinations} == {key for key, _ in model.named_parameters()}
    for spec, found, want in zip(trace.destinations, destinations, wanted, strict=True):
        assert torch.equal(found, want), spec.name


def test_a_parameter_that_the_trainer_lacks_is_an_error() -> None:
    config, architecture = MODELS["qwen2"]
    views = views_on_meta(config)
    views.views[:] = [pair for pair in views.views if pair[0] != "model.norm.weight"]
    with pytest.raises(HandoffError, match="1 parameters for which the trainer has no weight, e.g. model.norm.weight"):
        trace_on_meta(config, architecture, views, 0, 1, torch.bfloat16)


def test_a_parameter_that_vllm_makes_as_it_loads_is_refused() -> None:
    """A model that vLLM runs through transformers gets a bias of its head when its loader meets one."""
    with (
        stand_in_model(PHI, "TransformersForCausalLM", 0, 1, torch.float32, "cpu") as model,
        pytest.raises(
            ConfigError, match="creates lm_head.bias every time it loads weights.*set rollout.engine=inplace"
        ),
    ):
        trace_model(model, views_on_meta(PHI))


def test_phi_is_refused_where_vllm_runs_it_through_transformers() -> None:
    """As it does from 0.32 at the latest; 0.25.1 has code of its own, whose head has a bias from the start."""
    with stand_in_model(PHI, "PhiForCausalLM", 0, 1, torch.float32, "cpu") as model:
        if importlib.util.find_spec("vllm.model_executor.models.phi") is None:
            with pytest.raises(ConfigError, match="creates lm_head.bias every time"):
                trace_model(model, views_on_meta(PHI))
        else:
            trace = trace_model(model, views_on_meta(PHI))
            assert trace.untraced == {} and trace.unused == ()
            assert "lm_head.bias" in {spec.name for spec in trace.destinations}


def test_a_model_that_cannot_be_built_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.25.1 would leave the dtype of the engine, in which whatever comes next would be computed."""
    config, architecture = MODELS["qwen2"]

    def fails(*_: Any) -> Any:
        raise NotImplementedError("not on this platform")

    monkeypatch.setattr(meta, "initialize_model", fails)
    groups = [getattr(parallel_state, name) for name in meta.GROUPS]
    with pytest.raises(NotImplementedError, match="not on this platform"):
        trace_on_meta(config, architecture, views_on_meta(config), 0, 1, torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == torch.device("cpu")
    assert [getattr(parallel_state, name) for name in meta.GROUPS] == groups


def test_experts_that_a_reload_would_leave_unpacked_are_refused() -> None:
    config, architecture = MODELS["qwen3-moe"]
    with stand_in_model(config, architecture, 0, 1, torch.bfloat16, "meta") as model:
        check_reloadable(model, ["model.layers.0.self_attn.qkv_proj"])
        with pytest.raises(HandoffError, match="not pack them again; set rollout.engine_args.plain_weights=true"):
            check_reloadable(model, ["model.layers.0.mlp.experts.routed_experts"])


def test_a_trace_on_meta_is_that_of_the_live_model() -> None:
    config, architecture = MODELS["qwen3-moe"]
    views = views_on_meta(config)
    on_meta = trace_on_meta(config, architecture, views, 1, 2, torch.bfloat16)
    with stand_in_model(config, architecture, 1, 2, torch.bfloat16, "cpu") as model:
        assert is_same(trace_model(model, views), on_meta)
    assert not is_same(trace_on_meta(config, architecture, views, 0, 2, torch.bfloat16), on_meta)


def test_a_plan_traces_the_loader_if_no_file_has_its_trace() -> None:
    root = Path(__file__).parents[2]
    words = [f"model.path={root / 'docs/plans/models/qwen2.5-0.5b'}", "rollout.engine=vllm", "tensor_parallel_size=2"]
    config = planned_config(words, Machine(4, "80GB"))
    skeleton = build_on_meta(ModelRecipe.of_folder(str(config.model.path)), torch.bfloat16)
    fresh = plan_handoff(config, skeleton, ranks_per_host=2)
    filed = plan_handoff(config, skeleton, ranks_per_host=2, layouts=root / "benchmarks" / "layouts")
    assert fresh.source.startswith("traced here") and "qwen2.5-0.5b-tp2-rank1.npz" in filed.source
    assert fresh.links == filed.links and fresh.links["remote"].read_bytes > 0
