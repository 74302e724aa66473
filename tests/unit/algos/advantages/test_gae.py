"""GAE and VAPO: published numbers, and the targets of the critic."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hybrid_rl.algos.advantages import GAE, VAPO, generalized_advantages, length_adaptive_lambda
from hybrid_rl.algos.interface import AdvantageInputs


@pytest.mark.parametrize(
    ("lam", "expected"),
    [(0.95, [0.164715805, 0.06881, 0.02]), (1.0, [0.169102, 0.0698, 0.02]), (0.0, [0.1, 0.05, 0.02])],
)
def test_published_numbers(lam: float, expected: list[float]) -> None:
    """Values that make the errors .1, .05 and .02 with gamma .99."""
    values = [0.0, 0.0, 0.0]
    rewards = [0.1, 0.05, 0.02]
    columns = (torch.tensor(rewards).double(), torch.tensor(values), torch.ones(3).bool(), torch.zeros(3).long())
    found, returns = generalized_advantages(*columns, 1, gamma=0.99, lam=lam)
    assert found.tolist() == pytest.approx(expected, rel=1e-6) and returns.tolist() == found.tolist()


def test_length_adaptive_lambda() -> None:
    """alpha .05: 0 up to 20 tokens, where the formula is not above 0; .5 at 40, .98 at 1000."""
    found = length_adaptive_lambda(torch.tensor([0, 1, 20, 40, 1000]), alpha=0.05)
    assert found.tolist() == pytest.approx([0, 0, 0, 0.5, 0.98], abs=1e-15)


def inputs(rewards: list[float], lengths: list[int], values: torch.Tensor) -> AdvantageInputs:
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.arange(len(lengths)),
        rows=rows,
        mask=torch.ones(len(rows), dtype=torch.bool),
        token_rewards=torch.zeros(len(rows), dtype=torch.float64),
        values=values,
    )


def test_the_critic_of_vapo_learns_the_rewards_ahead() -> None:
    """Its lambda is 1: the sum of the rewards ahead, whatever the values say."""
    lengths, rewards = [30, 4], [1.0, -2.0]
    values = torch.linspace(-1, 1, 34, dtype=torch.float64)
    found = VAPO(whiten_advantages=False).compute(inputs(rewards, lengths, values))
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx([1.0] * 30 + [-2.0] * 4, abs=1e-12)


@pytest.mark.parametrize("estimator", [GAE(whiten_advantages=False), VAPO(whiten_advantages=False)])
def test_samples_without_a_reward(estimator: GAE | VAPO) -> None:
    """Nothing to learn: advantages 0, and targets that are what the critic says already."""
    values = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    found = estimator.compute(inputs([math.nan, 1.0], [2, 1], values))
    assert found.advantages.tolist() == [0.0, 0.0, 0.25]
    assert found.returns is not None and found.returns.tolist() == [0.5, 0.25, 1.0]


def test_whitening_leaves_returns_alone() -> None:
    values = torch.tensor([0.5, 0.25, 0.75, 9.0], dtype=torch.float64)
    samples = inputs([0.0, 1.0, math.nan], [2, 1, 1], values)
    plain, white = GAE(whiten_advantages=False).compute(samples), GAE().compute(samples)
    kept = plain.advantages[:3].tolist()
    deviation = math.sqrt(statistics.variance(kept) + 1e-8)
    assert white.advantages.tolist() == pytest.approx([(a - statistics.fmean(kept)) / deviation for a in kept] + [0.0])
    assert plain.returns is not None and white.returns is not None
    assert plain.returns.tolist() == white.returns.tolist()


def test_bad_arguments() -> None:
    rows, mask = torch.zeros(2).long(), torch.ones(2).bool()
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        generalized_advantages(torch.zeros(2), torch.zeros(3), mask, rows, 1, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"a number or \[1\]"):
        generalized_advantages(torch.zeros(2), torch.zeros(2), mask, rows, 1, gamma=1.0, lam=torch.ones(2))
    for lengths, alpha, message in (
        (torch.ones(1, 2), 0.05, r"lengths must be \[N\] and alpha above 0, not \(1, 2\)"),
        (torch.tensor([1]), 0.0, "alpha above 0, not .* and 0.0"),
        (torch.tensor([5, -3]), 0.05, "lengths are numbers of tokens, but one is -3"),
    ):
        with pytest.raises(ValueError, match=message):
            length_adaptive_lambda(lengths, alpha=alpha)
