"""exact=true in a whole Trainer: the engine, the trainer and the reference say the same of every token, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from hybrid_rl.compat import native
from hybrid_rl.errors import ConfigError
from hybrid_rl.models.exact import missing_operators
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer
from tests.unit.models.families import build

pytestmark = pytest.mark.skipif(not native.is_available() or bool(missing_operators()), reason="extension not built")
KEYS: dict[str, Any] = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12}
DIFFERENCES = ("mismatch/kl", "mismatch/prob_difference_mean", "handoff/probe_gap")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [{"lora.r": 4, "gradient_checkpointing": True}, {"num_iterations": 2}])
def test_nothing_differs(dtype: torch.dtype, keys: dict[str, Any], make_trainer) -> None:
    """Tokens are packed in several micro-batches; the second update of a batch has other weights, and other ratios."""
    model = build_model(hidden_size=32, dtype=dtype)
    trainer = make_trainer(
        model, exact=True, beta=0.05, tokens_per_micro_batch=64, learning_rate=1e-2, temperature=0.7, **KEYS, **keys
    )
    first, second = trainer.step().metrics, trainer.step().metrics
    for metrics in (first, second):
        assert {name: metrics[name] for name in DIFFERENCES} == dict.fromkeys(DIFFERENCES, 0.0)
        assert metrics["mismatch/ratio_p01"] == metrics["mismatch/ratio_p99"] == 1.0
    if "num_iterations" not in keys:
        assert first["kl"] == 0.0 < second["kl"]


def test_experts_of_the_engine_in_recomputed_layers(make_trainer) -> None:
    model = build("qwen3-moe", vocab_size=len(VOCABULARY))
    trainer = make_trainer(
        model,
        **{"exact": True, "routing_replay": "rollout", "gradient_checkpointing": True, "beta": 0.05, **KEYS},
        old_logprobs="recompute",
        learning_rate=1e-2,
        tokens_per_micro_batch=64,
    )
    first, second = trainer.step().metrics, trainer.step().metrics
    for metrics in (first, second):
        assert {name: metrics[name] for name in DIFFERENCES} == dict.fromkeys(DIFFERENCES, 0.0)
    assert first["kl"] == 0.0 < second["kl"]


def test_a_critic_runs_as_without(make_trainer) -> None:
    trainer = make_trainer(build_model(), exact=True, advantage="gae", **KEYS)
    metrics = trainer.step().metrics
    assert {name: metrics[name] for name in DIFFERENCES} == dict.fromkeys(DIFFERENCES, 0.0)
    assert metrics["critic/value_loss"] > 0


def test_a_reward_model_runs_as_without(make_trainer) -> None:
    config = Qwen2Config(**build_model().config.to_dict() | {"id2label": {0: "reward"}})
    rewards = Qwen2ForSequenceClassification(config)
    trainer = make_trainer(build_model(), rewards, exact=True, reward_processing_classes=build_tokenizer(), **KEYS)
    metrics = trainer.step().metrics
    assert {name: metrics[name] for name in DIFFERENCES} == dict.fromkeys(DIFFERENCES, 0.0)


def test_without_the_extension_it_is_refused(make_trainer, monkeypatch) -> None:
    monkeypatch.setattr("hybrid_rl.run.checks.missing_operators", lambda: ["exact_product"])
    with pytest.raises(ConfigError, match="model.exact=true needs the compiled extension, which has no exact_product"):
        make_trainer(build_model(), exact=True, **KEYS)
