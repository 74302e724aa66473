"""Pass@k and the maximum of a group."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hybrid_rl.algos.advantages import STD_FLOOR, MaxOfGroup, PassAtK
from hybrid_rl.errors import ConfigError

NAN = math.nan


def test_by_hand() -> None:
    """One success of four, k = 2: of six pairs three fail, R = sigma = 1/2; of a failure's three pairs two fail."""
    found = PassAtK(pass_k=2).of_samples(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros(4).long())
    assert found.tolist() == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3], rel=1e-14)


def test_groups_that_say_nothing_are_exactly_zero() -> None:
    """All succeed; none does; fewer failures than k; no more samples than k. A group with signal stands beside them,
    and unscored samples count in none."""
    groups = [[1.0] * 5, [0.0] * 5, [1.0, 1.0, 1.0, 0.0], [1.0, 0.0], [], [1.0, 0.0, 0.0, NAN, 0.0]]
    rewards = torch.tensor([reward for group in groups for reward in group])
    index = torch.tensor([g for g, group in enumerate(groups) for _ in group])
    found = PassAtK(pass_k=2).of_samples(rewards, index).tolist()
    assert found[:-5] == [0.0] * 16
    assert found[-5:] == pytest.approx([1, -1 / 3, -1 / 3, 0.0, -1 / 3], rel=1e-12)


def test_threshold_makes_rewards_binary() -> None:
    graded = PassAtK(pass_k=2, success_threshold=0.5).of_samples(
        torch.tensor([0.9, 0.5, 0.2, 0.1]), torch.zeros(4).long()
    )
    binary = PassAtK(pass_k=2).of_samples(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.zeros(4).long())
    assert graded.tolist() == binary.tolist() and bool((binary != 0).all())


def test_a_group_must_be_larger_than_k() -> None:
    assert PassAtK(pass_k=4).min_generations == 5 and PassAtK(pass_k=1).min_generations == 2
    with pytest.raises(ConfigError, match="pass_k=0"):
        PassAtK(pass_k=0)


def test_max_of_group() -> None:
    """Best less second best for the best; two best ones, a sample alone and unscored ones get 0."""
    rewards = torch.tensor([0.5, 2.0, NAN, 1.0, 3.0, 3.0, -1.0, 4.0])
    groups = torch.tensor([3, 3, 3, 3, 0, 0, 0, 9])
    expected = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert MaxOfGroup().of_samples(rewards, groups).tolist() == expected
    scaled = MaxOfGroup(scale_rewards="group").of_samples(rewards, groups).tolist()
    assert scaled[1] == pytest.approx(1 / (statistics.stdev([0.5, 2.0, 1.0]) + STD_FLOOR), rel=1e-14)
    assert scaled[:1] + scaled[2:] == [0.0] * 7


def test_max_of_group_is_leave_one_out() -> None:
    """max of all - max of all others, in 200 random groups of one call."""
    rewards = torch.rand(200, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = MaxOfGroup().of_samples(rewards.flatten(), torch.arange(200).repeat_interleave(5)).view_as(rewards)
    for row, advantages in zip(rewards.tolist(), found.tolist(), strict=True):
        expected = [max(row) - max(row[:i] + row[i + 1 :]) for i in range(5)]
        assert advantages == pytest.approx(expected, abs=1e-15)
