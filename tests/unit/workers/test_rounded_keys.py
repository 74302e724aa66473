"""rollout.kv_cache_dtype=int8 in whole runs: the probe of a handoff, the correction, the plan, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Jagged
from hybrid_rl.config.load import load_config
from hybrid_rl.config.validate import notices, resolve
from hybrid_rl.errors import ConfigError, HandoffError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.int8.rounded_keys import rounded_keys
from hybrid_rl.workers.handoff_probe import HandoffProbe
from tests.support.inside.workers import engine_of
from tests.support.tiny import build_model
from tests.unit.models.families import build
from tests.unit.workers.test_handoff_probe import answer

INT8: dict[str, Any] = {"kv_cache_dtype": "int8", "handoff.probe_steps": 1}


@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16"}, {"lora.r": 2}, {"engine_args.block_size": 4}], ids=str)
def test_a_run_corrects_for_rounded_keys_and_values(keys: dict[str, Any], make_trainer) -> None:
    model = build_model(dtype=getattr(torch, keys.get("dtype", "float32")), hidden_size=32)
    trainer = make_trainer(model, max_steps=3, learning_rate=3e-2, **INT8, **keys)
    assert trainer.config.correction.correction_mode == "tis"
    for _ in range(3):
        metrics = trainer.step().metrics
        assert metrics["skipped_updates"] == 0 and math.isfinite(metrics["grad_norm"])
        assert 0 < metrics["mismatch/kl_k3"] < 1e-2
        # Engine and trainer round the same numbers: what is left is their own difference, not that of the rounding.
        assert metrics["handoff/probe_gap"] < (1e-4 if "dtype" not in keys else 0.1)
    engine, config = engine_of(trainer), trainer.config.rollout
    settings = model.config
    heads, dim = settings.num_key_value_heads, settings.hidden_size // settings.num_attention_heads
    token = settings.num_hidden_layers * heads * (dim + 4 + -(-dim // 16) * 16 + 4)
    assert engine.kv_cache_bytes == engine.kv_cache_tokens * token
    assert engine.kv_cache_tokens % config.engine_args.block_size == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probe_trips_on_other_weights(dtype: str, make_trainer, monkeypatch) -> None:
    """The engine decodes from weights that moved after the trainer's half. The same run passes before."""
    own = HandoffProbe.expected

    def expected(self: HandoffProbe, model: CausalLM) -> torch.Tensor:
        rows = own(self, model)
        if is_stale:
            with torch.no_grad():
                for parameter in model.module.parameters():
                    parameter.mul_(2.0)
        return rows

    is_stale = False
    monkeypatch.setattr(HandoffProbe, "expected", expected)
    model = build_model(dtype=getattr(torch, dtype), hidden_size=32)
    trainer = make_trainer(model, **INT8, dtype=dtype)
    trainer.step()
    is_stale = True
    with pytest.raises(HandoffError, match="engine and trainer differ by"):
        trainer.step()


def test_the_tolerance_is_what_the_rounding_of_keys_does_to_the_probe() -> None:
    """It moves one of two tokens by 0.02: four times 0.02 / sqrt(2), the root of the average of squares."""
    probe = HandoffProbe((3, 4), resolve(*load_config({"kv_cache_dtype": "int8", "num_generations": 2})), torch.float32)
    rows = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    expected, limit = torch.stack([rows, rows + torch.tensor([[0.02], [0.0]])]), 4 * 0.02 / math.sqrt(2)
    assert probe.compare(expected, answer([0, 0], [-1.0, -1.0 - limit + 1e-3]), 1, None) > 0.05
    with pytest.raises(HandoffError, match=r"tolerance 0\.0566"):
        probe.compare(expected, answer([0, 0], [-1.0, -1.0 - limit - 1e-3]), 1, None)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_trainer_rounds_keys_and_values_inside_the_block_only(family: str) -> None:
    model = CausalLM(build(family))
    prompts, completions = (Jagged.from_rows([[*range(3, 3 + n)]], torch.int64) for n in (20, 9))
    row = model.row_of(prompts, completions)
    with torch.no_grad():
        plain = model.row_logprobs(row, 1.0)[0]
        with rounded_keys(model):
            rounded = model.row_logprobs(row, 1.0)[0]
        assert torch.equal(model.row_logprobs(row, 1.0)[0], plain)
    assert 1e-5 < float((plain - rounded).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"exact": True}, "model.exact=true wants equal logprobs"),
        ({"engine": "hf"}, "kv_cache_dtype"),
        ({"engine": "vllm"}, "kv_cache_dtype"),
    ],
)
def test_what_is_wrong_together_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(*load_config({"kv_cache_dtype": "int8", "num_generations": 2, **keys}))


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        ({}, "tis"),
        ({"correction": "mis"}, "mis"),
        ({"correction": "none"}, "none"),
        ({"old_logprobs": "rollout"}, "none"),
        ({"kv_cache_dtype": "auto"}, "none"),
    ],
)
def test_a_correction_is_chosen_if_none_is_named(keys: dict[str, Any], mode: str) -> None:
    config = resolve(*load_config({"kv_cache_dtype": "int8", "num_generations": 2, **keys}))
    assert config.correction.correction_mode == mode
    named = frozenset({"correction.correction_mode"} if "correction" in keys else ())
    words = f"rollout.kv_cache_dtype=int8: correction={mode} is chosen"
    assert any(words in notice for notice in notices(config, named)) == (keys == {})
