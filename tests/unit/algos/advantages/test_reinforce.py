"""REINFORCE++: what lies ahead of a token, normalised over the tokens of all ranks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hybrid_rl.algos.advantages import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from hybrid_rl.algos.interface import AdvantageInputs

MASK = torch.tensor([True, False, True, True, True, True, True])
ROWS = torch.tensor([0, 0, 0, 1, 1, 2, 3])
GROUPS = torch.tensor([0, 0, 1, 1])
REWARDS = torch.tensor([1.0, -0.5, 2.0, math.nan], dtype=torch.float64)
TOKENS = torch.tensor([-0.1, 0.0, -0.2, 0.0, 0.25, 0.0, 3.0], dtype=torch.float64)


def normalised(values: list[float]) -> list[float]:
    deviation = math.sqrt(statistics.variance(values) + 1e-8)
    return [(value - statistics.fmean(values)) / deviation for value in values]


def inputs() -> AdvantageInputs:
    return AdvantageInputs(REWARDS, GROUPS, ROWS, MASK, TOKENS)


@pytest.mark.parametrize(
    ("gamma", "returns"), [(1.0, [1.0, 1.1, -0.5, -0.5, 2.0]), (0.5, [-0.1 + 0.55, 1.1, -0.25, -0.5, 2.0])]
)
def test_returns_by_hand_normalised_over_tokens(gamma: float, returns: list[float]) -> None:
    """Sample 0: outcome 1.3 at its last token, penalties -.1 and -.2. Sample 1: outcome -.75 beside .25. A sample
    counts as often as it has tokens; what is masked or not scored counts nowhere."""
    a, b, c, d, e = normalised(returns)
    found = ReinforcePlusPlus(gamma=gamma).compute(inputs()).advantages.tolist()
    assert found == pytest.approx([a, 0, b, c, d, e, 0], rel=1e-12)


def test_baseline_is_the_mean_of_the_group() -> None:
    """1 and -.5 around .25; the third sample has nothing to be compared with: 0, which is normalised as well."""
    a, b, c, d, e = normalised([0.75, 0.75, -0.75, -0.75, 0.0])
    found = ReinforcePlusPlusBaseline().compute(inputs()).advantages.tolist()
    assert found == pytest.approx([a, 0, b, c, d, e, 0], rel=1e-12, abs=1e-12)


def test_equal_rewards_are_exactly_zero() -> None:
    """A naive centring of 49 times .1 leaves rounding, which normalising would blow up."""
    rewards, groups = torch.full((49,), 0.1, dtype=torch.float64), torch.zeros(49).long()
    assert sum([0.1] * 49) / 49 != 0.1
    rows, mask = torch.arange(49), torch.ones(49, dtype=torch.bool)
    for estimator in (ReinforcePlusPlus(), ReinforcePlusPlusBaseline()):
        found = estimator.compute(AdvantageInputs(rewards, groups, rows, mask, torch.zeros(49, dtype=torch.float64)))
        assert found.advantages.tolist() == [0.0] * 49
