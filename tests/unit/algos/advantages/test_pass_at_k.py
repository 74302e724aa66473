"""Pass@k and the maximum of a group."""

from __future__ import annotations

import itertools
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


@pytest.mark.parametrize("pass_k", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [5, 6, 8])
def test_against_all_subsets(size: int, pass_k: int) -> None:
    for successes in range(size + 1):
        rewards = [1.0] * successes + [0.0] * (size - successes)
        found = PassAtK(pass_k=pass_k).of_samples(torch.tensor(rewards), torch.full((size,), 7))
        assert found.tolist() == pytest.approx(subsets_reference(rewards, pass_k), rel=1e-12, abs=1e-12)
        assert float(found.sum()) == pytest.approx(0, abs=1e-12)


def subsets_reference(rewards: list[float], pass_k: int) -> list[float]:
    """The mean of the normalised reward of every subset of k that holds the sample."""
    subsets = list(itertools.combinations(range(len(rewards)), pass_k))
    worth = [float(max(rewards[i] for i in subset) >= 1) for subset in subsets]
    mean, deviation = statistics.fmean(worth), statistics.pstdev(worth)
    if deviation == 0:
        return [0.0] * len(rewards)
    return [
        statistics.fmean((w - mean) / deviation for w, subset in zip(worth, subsets, strict=True) if i in subset)
        for i in range(len(rewards))
    ]
