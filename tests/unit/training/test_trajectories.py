"""Trajectories of several turns: one advantage, one place in denominators, however they are cut into samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybrid_rl.algos import AdvantageEstimator, KLInReward
from hybrid_rl.algos.advantages import GRPO, RLOO
from hybrid_rl.batch import Batch, Jagged, Trajectories
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import DataError
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.training.balance import assign_mini_batches, split_over_ranks
from hybrid_rl.training.estimate import AdvantageSpec, with_advantages
from hybrid_rl.training.kl_weight import KLWeight
from hybrid_rl.training.mini_batch import with_trajectory_tokens
from hybrid_rl.training.spec import Counts, LossSpec
from tests.unit.training.grpo_step import case_config

# Group 0: A of one turn and B of two; group 1: C of three turns and D of one. The samples stand in no order.
A, B, C, D = 10, 11, 12, 13
KEYS = [(C, 2), (A, 0), (B, 1), (C, 0), (D, 0), (B, 0), (C, 1)]
NUM_TOKENS = {(A, 0): 2, (B, 0): 1, (B, 1): 3, (C, 0): 1, (C, 1): 2, (C, 2): 1, (D, 0): 3}  # 2, 4, 4 and 3
REWARDS = {A: 1.0, B: 0.0, C: 2.0, D: -1.0}


def batch_of(rewards: dict[int, float] = REWARDS) -> Batch:
    completions = Jagged.from_rows([[5] * NUM_TOKENS[key] for key in KEYS], torch.int64)
    return Batch(
        {
            "prompt_ids": Jagged.from_rows([[3, 4]] * len(KEYS), torch.int64),
            "prompt_length": torch.full((len(KEYS),), 2),
            "completion_ids": completions,
            "completion_length": completions.lengths,
            "completion_mask": completions.with_values(torch.ones_like(completions.values, dtype=torch.bool)),
            "group": torch.tensor([0 if trajectory in (A, B) else 1 for trajectory, _ in KEYS]),
            "trajectory": torch.tensor([trajectory for trajectory, _ in KEYS]),
            "turn": torch.tensor([turn for _, turn in KEYS]),
            "rewards": torch.tensor([rewards[trajectory] for trajectory, _ in KEYS], dtype=torch.float64),
        }
    )


def advantages(estimator: AdvantageEstimator, batch: Batch) -> dict[int, list[float]]:
    """Of all tokens of each trajectory, turn after turn."""
    made = with_advantages(batch, AdvantageSpec(estimator), RankContext(), 0.0)
    assert sample_keys(made) == sample_keys(batch)
    found: dict[int, list[float]] = {}
    for key, row in sorted(zip(sample_keys(made), made["advantages"], strict=True), key=lambda pair: pair[0]):
        found.setdefault(key.trajectory, []).extend(row.tolist())
    return found


def spread(of_trajectories: dict[int, float]) -> dict[int, Any]:
    """The same number at each token of a trajectory."""
    sizes = {A: 2, B: 4, C: 4, D: 3}
    return {name: pytest.approx([value] * sizes[name], abs=1e-6) for name, value in of_trajectories.items()}


def test_a_group_counts_each_trajectory_once() -> None:
    """Means are 1/2 in both groups; over samples they would be 1/3 and 5/4. Deviations are 1 / sqrt(2) and
    3 / sqrt(2)."""
    batch = batch_of()
    assert advantages(GRPO(scale_rewards="none"), batch) == spread({A: 0.5, B: -0.5, C: 1.5, D: -1.5})
    small, large = 0.5 / (math.sqrt(0.5) + 1e-4), 1.5 / (math.sqrt(4.5) + 1e-4)
    assert advantages(GRPO(), batch) == spread({A: small, B: -small, C: large, D: -large})
    scale = math.sqrt(5 / 3) + 1e-4  # of 1, 0, 2 and -1
    assert advantages(GRPO(scale_rewards="batch"), batch) == spread(
        {A: 0.5 / scale, B: -0.5 / scale, C: 1.5 / scale, D: -1.5 / scale}
    )
    assert advantages(RLOO(), batch) == spread({A: 1.0, B: -1.0, C: 3.0, D: -3.0})
    without = advantages(RLOO(), batch_of(REWARDS | {B: math.nan}))
    assert without == spread({A: 0.0, B: 0.0, C: 3.0, D: -3.0})


def test_turns_with_rewards_of_their_own_are_refused() -> None:
    batch = batch_of()
    rewards = batch["rewards"].clone()
    rewards[KEYS.index((C, 1))] = 0.5
    with pytest.raises(DataError, match=r"turns of trajectory 12 have the rewards 2 and 0\.5; .*sum over its turns"):
        advantages(GRPO(), batch.without("rewards").with_columns(rewards=rewards))


def test_denominators_count_trajectories() -> None:
    spec = LossSpec.of(case_config())
    assert Counts.of(batch_of(), spec) == Counts(num_tokens=13, num_trajectories=4, num_positive_tokens=6)
    failed = batch_of(REWARDS | {C: math.nan})
    assert Counts.of(failed, spec) == Counts(num_tokens=9, num_trajectories=3, num_positive_tokens=2)
    tokens = with_trajectory_tokens(failed, spec)["trajectory_tokens"].tolist()
    assert tokens == [{A: 2, B: 4, C: 0, D: 3}[trajectory] for trajectory, _ in KEYS]
    alone = batch_of().select([KEYS.index((A, 0)), KEYS.index((D, 0))])
    assert "trajectory_tokens" not in with_trajectory_tokens(alone, spec)


def test_ranks_and_mini_batches_have_whole_trajectories() -> None:
    batch = batch_of()
    batch = batch.with_columns(mini_batch=assign_mini_batches(batch["group"], 1, seed=3))
    found = Trajectories.of(batch)
    assert torch.equal(batch["mini_batch"], batch["mini_batch"][found.first][found.index])
    parts = [set(batch["trajectory"][part].tolist()) for part in split_over_ranks(batch, 2, 0.0)]
    assert sorted(map(sorted, parts)) == [[A, B], [C, D]]


def test_an_adaptive_weight_counts_trajectories() -> None:
    """A KL of .5 at each of 13 tokens is 1.625 for each of 4 trajectories: 30 % over 1.25, and clipped to 20 %; samples
    of .93 would lower it."""
    batch = batch_of()
    completions = batch["completion_ids"]
    logs = {"old_logprobs": -0.5, "ref_logprobs": -1.0}
    batch = batch.with_columns(
        **{name: completions.with_values(torch.full((13,), value)) for name, value in logs.items()}
    )
    weight = KLWeight(KLInReward(beta=0.1, kl_estimator="k1", kl_target=1.25, kl_horizon=100))
    weight.follow(batch, MetricSums(), RankContext())
    assert weight.beta == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
