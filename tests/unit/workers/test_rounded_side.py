"""rollout.quantization=int8 in whole runs: the handoff, its proof and probe, the correction, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.config.load import load_config
from hybrid_rl.config.validate import notices, resolve
from hybrid_rl.errors import HandoffError
from hybrid_rl.models.int8.int8_model import Int8CausalLM
from hybrid_rl.models.int8.rounding import Int8Weight
from hybrid_rl.planning.engines import rounded_share
from hybrid_rl.resharding.handoff.tensor import TensorSource
from hybrid_rl.weights.sources import named_weights
from tests.support.inside.models import rounded_weights
from tests.support.inside.workers import actor_of, engine_of
from tests.support.tiny import build_model

pytestmark = pytest.mark.skipif(native.operator("int8_linear") is None, reason="the compiled extension is not built")

INT8: dict[str, Any] = {"rollout.quantization": "int8", "learning_rate": 3e-2}
CACHE = {"engine": "vllm", "quantization": "none"}
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "keys", [{}, {"speculation": "on", "kv_cache_dtype": "int8"}, {"num_generations": 4, "beta": 0.1}]
)
def test_a_run_learns_from_rounded_weights_and_corrects_for_them(keys: dict[str, Any], make_trainer) -> None:
    model = build_model()
    trainer = make_trainer(model, max_steps=3, **INT8, **keys)
    assert trainer.config.correction.correction_mode == "tis"
    for _ in range(3):
        metrics = trainer.step().metrics
        assert metrics["skipped_updates"] == 0 and math.isfinite(metrics["grad_norm"])
        assert 0 < metrics["mismatch/kl_k3"] < 1e-2 and metrics["handoff/unproven_bytes"] == 0
    engine = engine_of(trainer)
    fresh = Int8Weight.of(named_weights(model)[NAME])
    held = rounded_weights(engine.rounded)[NAME]
    assert torch.equal(held.values, fresh.values) and torch.equal(held.scales, fresh.scales)
    assert metrics["handoff/bytes"] == engine.rounded.num_bytes > 0
    assert rounded_share(model, 4, is_whole=False).num_bytes == engine.rounded.num_bytes
    assert metrics["memory/engine_weights_bytes"] == engine.rounded.num_bytes


def test_masters_are_rounded_not_their_bfloat16_copies(make_trainer) -> None:
    model = build_model(dtype=torch.bfloat16)
    trainer = make_trainer(model, dtype="bfloat16", **INT8)
    trainer.fit()
    masters = actor_of(trainer).optimizer.masters()
    held = rounded_weights(engine_of(trainer).rounded)[NAME]
    assert torch.equal(held.scales, Int8Weight.of(masters[NAME]).scales)
    assert not torch.equal(held.scales, Int8Weight.of(named_weights(model)[NAME]).scales)


def bias_of_its_own(module: Any) -> None:
    module.model.layers[0].mlp.down_proj.bias = torch.nn.Parameter(torch.ones(module.config.hidden_size))


def layer_fewer(module: Any) -> None:
    del module.model.layers[-1]


@pytest.mark.parametrize("change", [bias_of_its_own, layer_fewer])
def test_a_model_that_was_changed_since_is_refused(change: Any, make_trainer) -> None:
    model = build_model()
    engine = engine_of(make_trainer(model, **INT8))
    engine.update_weights(TensorSource.of(model), 1)
    change(model)
    with pytest.raises(HandoffError, match="modules or parameters of the model were replaced"):
        engine.update_weights(TensorSource.of(model), 2)


def stale(kind: str) -> Any:
    """A handoff that forgets integers or scales of one weight."""
    own = Int8CausalLM.write

    def write(self: Int8CausalLM, weights: Any) -> None:
        before = rounded_weights(self)[NAME]
        kept = (before.values if kind == "integers" else before.scales).clone()
        own(self, weights)
        if float(kept.abs().sum()):  # not in the first handoff
            (before.values if kind == "integers" else before.scales).copy_(kept)

    return write


@pytest.mark.parametrize("kind", ["integers", "scales"])
def test_a_handoff_that_leaves_something_stale_is_stopped_by_the_proof(kind: str, make_trainer, monkeypatch) -> None:
    monkeypatch.setattr(Int8CausalLM, "write", stale(kind))
    trainer = make_trainer(**INT8)
    with pytest.raises(HandoffError, match=f"{kind} of {NAME}"):
        trainer.fit()


@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["integers", "scales"])
def test_the_probe_trips_on_stale_weights_without_the_proof(
    kind: str, dtype: str, cache: str, make_trainer, monkeypatch
) -> None:
    """All of one kind, from before a large update. The same run with nothing stale passes."""
    own = Int8CausalLM.write

    def write(self: Int8CausalLM, weights: Any) -> None:
        kept = {name: (held.values.clone(), held.scales.clone()) for name, held in rounded_weights(self).items()}
        own(self, weights)
        for name, (values, scales) in kept.items():
            if is_stale and float(scales.sum()):
                (
                    rounded_weights(self)[name].values if kind == "integers" else rounded_weights(self)[name].scales
                ).copy_(values if kind == "integers" else scales)

    is_stale = False
    monkeypatch.setattr(Int8CausalLM, "write", write)
    monkeypatch.setattr(Int8CausalLM, "check", lambda *_: None)
    keys = {**INT8, "learning_rate": 0.3, "handoff.probe_steps": 1, "dtype": dtype, "kv_cache_dtype": cache}
    module = build_model(dtype=getattr(torch, dtype), hidden_size=32)
    trainer = make_trainer(module, **keys)
    trainer.step()
    is_stale = True
    with pytest.raises(HandoffError, match="engine and trainer differ by"):
        trainer.step()


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        ({}, "tis"),
        ({"correction": "mis"}, "mis"),
        ({"correction": "none"}, "none"),
        ({"old_logprobs": "rollout"}, "none"),
        ({"quantization": "none"}, "none"),
        ({"quantization": "none", "dtype": "bfloat16"}, "none"),
        ({"engine": "vllm", "quantization": "fp8"}, "tis"),
        ({"engine": "vllm", "quantization": "fp8", "quantization_aware": True}, "none"),
        ({**CACHE, "engine_args.kv_cache_dtype": "fp8"}, "tis"),
        ({**CACHE, "engine_args": {"kv_cache_dtype": "bfloat16"}}, "tis"),
        ({**CACHE, "rollout.engine_args.kv_cache_dtype": "bfloat16", "dtype": "bfloat16"}, "none"),
        ({**CACHE, "engine_args.kv_cache_dtype": "auto"}, "none"),
        ({**CACHE, "quantization": "int4", "quantization_aware": True, "engine_args.kv_cache_dtype": "fp8"}, "tis"),
    ],
)
def test_a_correction_is_chosen_if_none_is_named(keys: dict[str, Any], mode: str) -> None:
    config = resolve(*load_config({"quantization": "int8", "num_generations": 2, **keys}))
    assert config.correction.correction_mode == mode
    named = frozenset({"correction.correction_mode"} if "correction" in keys else ())
    chosen = [notice for notice in notices(config, named) if f"correction={mode} is chosen" in notice]
    assert len(chosen) == (mode == "tis")
    if CACHE.items() <= keys.items():
        cache = keys.get("engine_args.kv_cache_dtype", "bfloat16")
        assert all(notice.startswith(f"rollout.engine_args.kv_cache_dtype={cache}: ") for notice in chosen)
