"""The guard against an engine that disagrees with its trainer, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import HandoffError
from hybrid_rl.training.mismatch import FIRST_GAP, LEAST_GAP_16_BIT, NUM_FIRST, MismatchGuard


def guard(dtype=torch.float32, context=None):
    return MismatchGuard(dtype, context or RankContext())


def gaps(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_gap_is_held_against_those_of_the_steps_before():
    made = guard()
    assert made.tolerance == FIRST_GAP
    made.check_gaps(gaps(1e-6, -3e-6), 1)
    assert made.tolerance == 1e-3  # ten times 2e-6 is less than what is never a fault
    made.check_gaps(gaps(0.0009, 0.0007), 2)
    assert made.tolerance == pytest.approx(8e-3)
    with pytest.raises(
        HandoffError, match=r"version 3: .* differ by 0.0085 on average .* 2 tokens .*at most 0.0008 in the first"
    ):
        made.check_gaps(gaps(0.017, 0.0), 3)
    made.check_gaps(gaps(0.0079), 3)  # what was refused counts for nothing


def test_an_engine_that_stays_behind_is_found_although_every_step_is_like_the_last():
    made = guard()
    for version in range(1, NUM_FIRST * 10 + 1):
        made.check_gaps(gaps(1e-4 * version), version)
    with pytest.raises(HandoffError, match=r"at most 0.0016 in the first steps; 0.016 is allowed"):
        made.check_gaps(gaps(1e-4 * (NUM_FIRST * 10 + 1)), 161)


def test_a_token_counts_at_most_one_and_what_is_not_finite_is_left_to_the_update():
    made = guard(torch.bfloat16)
    made.check_gaps(gaps(*[0.0] * 9, 40.0), 1)
    assert made.tolerance == 1.0
    made.check_gaps(gaps(0.1, torch.nan), 2)
    made.check_gaps(gaps(), 3)
    assert made.tolerance == 1.0 and guard(torch.bfloat16).tolerance == FIRST_GAP > LEAST_GAP_16_BIT


def test_the_rank_that_differs_most_is_named_on_all():
    context = SimpleNamespace(data_gather=lambda mine: [(0.001, 10), mine, (0.0, 0)])
    made = guard(context=context)
    with pytest.raises(HandoffError, match=r"differ by 0.75 on average in ln p of the 40 tokens .*on rank 1 \(1\)"):
        made.check_gaps(torch.full((30,), 2.0, dtype=torch.float64), 5)


def test_only_tokens_of_the_present_weights_are_compared():
    """Older ones, those of demonstrations, and those of the environment may differ as they like."""
    batch = Batch(
        {
            "completion_ids": Jagged.from_rows([[1, 2, 3], [4]], torch.int64),
            "completion_mask": Jagged.from_rows([[True, False, True], [True]], torch.bool),
            "rollout_logprobs": Jagged.from_rows([[-1.0, -9.0, -9.0], [-9.0]], torch.float32),
            "policy_version": Jagged.from_rows([[4, 4, 3], [-1]], torch.int64),
            "rewards": torch.ones(2, dtype=torch.float64),
            "finish_reason": ["stop", "stop"],
        }
    )
    made = guard()
    made.check(batch, torch.full((4,), -1.25), 4)
    assert made.tolerance == pytest.approx(2.5)
