"""What is known of each token of a few samples a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch, Jagged, SampleKey
from hybrid_rl.training.said import FirstWords
from hybrid_rl.workers import token_records
from hybrid_rl.workers.token_records import chosen


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + token) for token in ids)


def batch(num_samples: int = 3, taught: tuple[int, ...] = (0, 1, 2)) -> Batch:
    """Samples of two tokens each, the second of which a tool made in sample 1."""
    ids = Jagged.from_rows([[0, 1]] * num_samples, torch.int64)
    mask = torch.ones(2 * num_samples, dtype=torch.bool)
    if num_samples > 1:
        mask[3] = False
    advantages = [[0.25, 0.25] if row in taught else [0.0, 0.0] for row in range(num_samples)]
    return Batch(
        {
            "trajectory": torch.arange(num_samples) + 10,
            "turn": torch.zeros(num_samples, dtype=torch.int64),
            "completion_ids": ids,
            "completion_mask": ids.with_values(mask),
            "rollout_logprobs": ids.with_values(torch.linspace(-1, -2, 2 * num_samples)),
            "advantages": Jagged.from_rows(advantages, torch.float32),
        }
    )


def records(samples: Batch, said: FirstWords | None, number: int = 4) -> dict[SampleKey, dict[str, Any]]:
    tokenizer: Any = Letters()
    return token_records.token_records(samples, tokenizer, said, number)


def test_each_token_has_what_engine_and_trainer_said_of_it() -> None:
    samples = batch()
    # The first mini-batch had samples 2 and 1, in this order.
    said = FirstWords.of(samples.select([2, 1]), torch.tensor([[-1.5, -2.5, -3.5, -4.5], [0.1, 0.2, 0.3, math.inf]]))
    found = records(samples, said)
    assert found[SampleKey(12)] == {
        "text": ["a", "b"],
        "logprob": [-1.8, -2.0],
        "trainer_logprob": [-1.5, -2.5],
        "entropy": [0.1, 0.2],
        "advantage": [0.25, 0.25],
    }
    tools = found[SampleKey(11)]
    assert tools["policy"] == [1, 0] and tools["trainer_logprob"] == [-3.5, None] and tools["entropy"] == [0.3, None]
    assert found[SampleKey(10)].keys() == {"text", "logprob", "advantage"}  # of a later mini-batch


def test_later_mini_batches_have_the_logprobs_that_the_algorithm_computes() -> None:
    samples = batch(1)
    old = samples["completion_ids"].with_values(torch.tensor([-3.0, math.nan]))
    (found,) = records(samples.with_columns(old_logprobs=old, ref_logprobs=old), None).values()
    assert found["trainer_logprob"] == found["ref_logprob"] == [-3.0, None]


def test_long_completions_are_cut_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_records, "MAX_TOKENS", 1)
    (found,) = records(batch(1), None).values()
    assert found == {"text": ["a"], "logprob": [-1.0], "advantage": [0.25], "num_tokens": 2}


def test_samples_that_teach_something_are_shown_first() -> None:
    assert chosen(batch(12, taught=(3, 5, 7, 9)), 2) == [3, 7]
    assert chosen(batch(12, taught=(3,)), 4) == [0, 3, 4, 8]
    assert chosen(batch(3, taught=()), 4) == [0, 1, 2]
    assert chosen(batch(12).without("advantages"), 3) == [0, 4, 8]
    assert chosen(batch(3).select([]), 4) == []


def test_every_rank_shows_one_at_least() -> None:
    assert len(records(batch(3), None, number=0)) == 1
