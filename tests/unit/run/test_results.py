"""Results of steps as users hold them: batches that can be read, and metrics that show themselves."""

from __future__ import annotations

import pickle

import pytest
import torch

from hybrid_rl.logging.meanings import meaning_of
from hybrid_rl.run.step_results import Metrics, StepResult
from tests.support.libraries.python_names import html_of
from tests.support.tiny import build_model, exact, spread


def test_a_step_can_be_read(make_trainer) -> None:
    trainer = make_trainer(build_model(), [spread, exact], reward_weights=[1.0, 0.5])
    result = trainer.step()
    sample = result.batch.samples()[0]
    assert sample.rewards.keys() == {"spread", "exact"}
    assert sample.reward == pytest.approx(sample.rewards["spread"] + 0.5 * sample.rewards["exact"])
    joined = "".join(token.text for token in sample.tokens).replace("<eos>", "")
    assert joined == trainer.tokenizer.decode(result.batch["completion_ids"][0]).replace("<eos>", "")
    assert sample.completion in repr(result.batch.show(first=1))
    assert set(sample.row) <= set(result.batch.to_pandas().columns)
    text = repr(result)
    assert len(text) < 400 and "8 samples in 4 groups" in text and f".metrics  {len(result.metrics)}" in text
    page = html_of(result)
    assert "mean entropy of the policy" in page and "<table" in page
    batch, metrics = result
    assert isinstance(result, StepResult) and metrics == pickle.loads(pickle.dumps(metrics)) == dict(metrics)


def test_logprobs_of_the_update_are_those_of_a_forward_pass_before_it(make_trainer) -> None:
    """With one optimizer step nothing else computes them; packed into several micro-batches they keep their places."""
    found = {}
    for mode in ("detach", "recompute"):
        trainer = make_trainer(build_model(), old_logprobs=mode, tokens_per_micro_batch=64)
        found[mode] = trainer.step().batch["old_logprobs"]
    assert torch.equal(found["detach"].offsets, found["recompute"].offsets)
    torch.testing.assert_close(found["detach"].values, found["recompute"].values, atol=1e-6, rtol=0)
    assert found["detach"].values.abs().min() > 0


def test_metrics_show_themselves() -> None:
    metrics = Metrics({"timing/step": 0.5, "reward": 0.25, "eval/reward": 1.0, "mine": 3.0, "<b>": 1.0})
    assert repr(metrics) == "Metrics(reward 0.25, eval reward 1; 5 in all: text() or dict(...) shows them)"
    assert repr(Metrics()) == "Metrics()"
    assert list(metrics.groups()) == ["main", "eval", "timing"]
    assert "  timing/step        0.5  seconds of the whole training step" in metrics.text().splitlines()
    page = html_of(metrics)
    assert "&lt;b&gt;" in page and "><b>" not in page
    assert page.count("<details open>") == 1  # of the main ones


def test_meanings_of_metrics(make_trainer) -> None:
    """Every metric of a step and an evaluation has one, but for those that are the user's."""
    trainer = make_trainer(build_model(), eval_dataset=[{"prompt": "1+1=", "answer": "2"}], max_steps=1)
    unknown = [name for name in trainer.fit() if not meaning_of(name)]
    assert unknown == []
    assert meaning_of("eval/reward") == meaning_of("reward") != ""
    assert meaning_of("my_own") == ""
