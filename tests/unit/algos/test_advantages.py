"""Group-relative advantages: the published numbers, Python's own statistics, and exact zeros."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.algos import group_has_signal, group_relative_advantages
from hybrid_rl.algos.advantages import STD_FLOOR

NAN = math.nan
SCALES = ["group", "batch", "none"]


def advantages(rewards: list[float], groups: list[int], scale: str = "group") -> list[float]:
    result = group_relative_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), scale_rewards=scale
    )
    assert result.dtype == torch.float64
    return result.tolist()


def reference(rewards: list[float], groups: list[int], scale: str) -> list[float]:
    """The definition, sample by sample, in exact fractions where Python has them."""
    scored = [r for r in rewards if not math.isnan(r)]
    batch_std = statistics.stdev(scored) if len(scored) > 1 else 0.0
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward) or len(mates) < 2 or max(mates) == min(mates):
            result.append(0.0)
            continue
        divisor = {"group": statistics.stdev(mates) + STD_FLOOR, "batch": batch_std + STD_FLOOR, "none": 1.0}[scale]
        result.append((reward - statistics.mean(mates)) / divisor)
    return result


def test_one_success_of_eight() -> None:
    """Sample standard deviation sqrt(1/8): 2.4749 and -.3536, which the floor of 1e-4 lowers by 0.03 %."""
    won, *lost = advantages([1.0] + [0.0] * 7, [0] * 8)
    assert won == pytest.approx(2.4749, rel=5e-4) and lost == pytest.approx([-0.3536] * 7, rel=5e-4)
    assert won == pytest.approx(0.875 / (math.sqrt(1 / 8) + 1e-4), rel=1e-14)
    assert advantages([1.0] + [0.0] * 7, [0] * 8, "none") == [0.875] + [-0.125] * 7


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 49])
def test_equal_rewards_are_exactly_zero(scale: str, dtype: torch.dtype, size: int) -> None:
    """A naive centring of .1 in fp32 over a std floor of 1e-8 yields -.415. A group with signal stands beside it, so
    that the batch's deviation is not zero."""
    rewards = torch.tensor([0.1] * size + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([5] * size + [6, 6])
    result = group_relative_advantages(rewards, groups, scale_rewards=scale)
    assert result[:size].tolist() == [0.0] * size and bool((result[size:] != 0).all())


def test_batch_scale_by_hand() -> None:
    """Rewards 0 1 | 2 4: centred -.5 .5 -1 1; deviation of all four sqrt(8.75 / 3)."""
    divisor = math.sqrt(8.75 / 3) + 1e-4
    expected = [-0.5 / divisor, 0.5 / divisor, -1 / divisor, 1 / divisor]
    assert advantages([0, 1, 2, 4], [0, 0, 1, 1], "batch") == pytest.approx(expected, rel=1e-14)


def test_unscored_samples_count_nowhere() -> None:
    """[1, 0] with and without an unscored third: the same, and 0 for it."""
    for scale in SCALES:
        with_gap = advantages([1.0, NAN, 0.0], [4, 4, 4], scale)
        assert [with_gap[0], with_gap[2]] == advantages([1.0, 0.0], [4, 4], scale)
        assert with_gap[1] == 0.0


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[NAN, NAN], [0.3, NAN], [NAN]])
def test_groups_that_compare_nothing(scale: str, rewards: list[float]) -> None:
    assert advantages(rewards, [0] * len(rewards), scale) == [0.0] * len(rewards)


@pytest.mark.parametrize("scale", SCALES)
def test_no_samples(scale: str) -> None:
    assert advantages([], [], scale) == []


@given(
    samples=st.lists(
        st.tuples(st.sampled_from([-1, 0, 3, 2**40]), st.sampled_from([0.0, 1.0, 0.1, -2.5, 7.0, NAN])),
        min_size=1,
        max_size=20,
    ),
    scale=st.sampled_from(SCALES),
)
def test_uneven_groups_against_the_definition(samples: list[tuple[int, float]], scale: str) -> None:
    groups, rewards = (list(part) for part in zip(*samples, strict=True))
    assert advantages(rewards, groups, scale) == pytest.approx(reference(rewards, groups, scale), rel=1e-12, abs=1e-12)


def test_order_and_names_of_groups_do_not_matter() -> None:
    rewards, groups = torch.rand(24), torch.arange(24) % 5
    order = torch.randperm(24)
    renamed = torch.tensor([2**40, -7, 3, 12, 0])[groups]
    expected = group_relative_advantages(rewards, groups)
    torch.testing.assert_close(group_relative_advantages(rewards[order], renamed[order]), expected[order])


@pytest.mark.parametrize(("size", "factor"), [(2, 0.5), (4, 0.75), (8, 0.875)])
def test_own_sample_in_the_mean_scales_the_expected_gradient(size: int, factor: float) -> None:
    """Every outcome of a Bernoulli policy: E[mean of A grad ln p] is (1 - 1/G) times the true gradient p (1 - p)."""
    p = 0.3
    outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)
    groups = torch.arange(len(outcomes)).repeat_interleave(size)
    centred = group_relative_advantages(outcomes.flatten(), groups, scale_rewards="none").view_as(outcomes)
    probability = (p * outcomes + (1 - p) * (1 - outcomes)).prod(1)
    expected = (probability * (centred * (outcomes - p)).mean(1)).sum()
    assert float(expected) == pytest.approx(factor * p * (1 - p), rel=1e-12)


def test_group_has_signal() -> None:
    rewards = torch.tensor([0.1, 1.0, NAN, 0.1, 1.0, 0.0, NAN, 0.5])
    groups = torch.tensor([9, -1, -1, 9, 4, 4, 5, 5])
    assert group_has_signal(rewards, groups).tolist() == [False, True, False, False]  # groups -1, 4, 5, 9


@pytest.mark.parametrize(
    ("rewards", "groups", "scale", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 2), "group", r"must be \[N\]"),
        (torch.zeros(2), torch.zeros(3), "group", r"\(2,\) and \(3,\)"),
        (torch.zeros(2), torch.zeros(2), "std", "use group, batch or none"),
    ],
)
def test_bad_arguments(rewards: torch.Tensor, groups: torch.Tensor, scale: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_relative_advantages(rewards, groups.long(), scale_rewards=scale)
