"""Columns that contradict each other about who made a token."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.batch.origins import check_origins
from hybrid_rl.errors import DataError

MASK = [[True, True], [True, False, False, True], [False]]
VERSIONS = [[3, 4], [4, -1, -1, 5], [-1]]
LOGPROBS = [[-1.0, 0.0], [-math.inf, 0.0, 0.0, -0.5], [0.0]]


def batch_of(versions: list[list[int]] = VERSIONS, logprobs: list[list[float]] = LOGPROBS) -> Batch:
    return Batch(
        {
            "completion_ids": Jagged.from_rows([[7] * len(row) for row in MASK], torch.int64),
            "completion_mask": Jagged.from_rows(MASK, torch.bool),
            "policy_version": Jagged.from_rows(versions, torch.int64),
            "rollout_logprobs": Jagged.from_rows(logprobs, torch.float32),
            "trajectory": torch.tensor([20, 20, 21]),
            "turn": torch.tensor([0, 1, 0]),
        }
    )


def test_columns_that_agree_pass() -> None:
    check_origins(batch_of())
    check_origins(batch_of().select([]))


@pytest.mark.parametrize(
    ("versions", "logprobs", "message"),
    [
        ([3, 4, 4, 4, -1, 5, -1], None, r"token 1 of the completion of trajectory 20 turn 1 is the environment's by"),
        ([3, 4, 4, -1, -1, -1, -1], None, r"token 3 .* 20 turn 1 is the policy's .* version -1 and logprob -0\.5;"),
        (None, [-1, 0, -1, 0, 0, -1, -0.1], r"token 0 .* trajectory 21 is the environment's .* and logprob -0\.1;"),
        (None, [-1, 0, -1, math.nan, 0, -1, 0], r"token 1 .* turn 1 is the environment's .* logprob nan"),
    ],
    ids=["version", "no version", "logprob", "not a number"],
)
def test_a_contradiction_is_refused(versions: list[int] | None, logprobs: list[float] | None, message: str) -> None:
    batch = batch_of()
    offsets = batch["completion_ids"].offsets
    if versions is not None:
        batch = batch.without("policy_version").with_columns(policy_version=Jagged(torch.tensor(versions), offsets))
    if logprobs is not None:
        column = Jagged(torch.tensor(logprobs, dtype=torch.float32), offsets)
        batch = batch.without("rollout_logprobs").with_columns(rollout_logprobs=column)
    with pytest.raises(DataError, match=message):
        check_origins(batch)
