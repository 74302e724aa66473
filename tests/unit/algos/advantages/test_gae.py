"""GAE and VAPO: published numbers, loops over samples and tokens, and the environment's tokens in between."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.algos.advantages import GAE, VAPO, generalized_advantages, length_adaptive_lambda
from hybrid_rl.algos.interface import AdvantageInputs


def reference(
    rewards: list[float], values: list[float], made: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """One sample: the sum over k of (gamma lambda)^k delta_{t+k}, written out over its own tokens."""
    own = [i for i, m in enumerate(made) if m]
    next_value = dict(zip(own, [values[i] for i in own[1:]] + [0.0], strict=False))
    delta = [rewards[i] + gamma * next_value[i] - values[i] for i in own]
    advantages = [0.0] * len(made)
    for t, i in enumerate(own):
        advantages[i] = math.fsum((gamma * lam) ** k * d for k, d in enumerate(delta[t:]))
    return advantages, [a + v if m else 0.0 for a, v, m in zip(advantages, values, made, strict=True)]


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


SAMPLES = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), max_size=8), min_size=1, max_size=6
)


@given(samples=SAMPLES, gamma=st.sampled_from([1.0, 0.9]), lams=st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_against_loops(samples: list[list[tuple[bool, float, float]]], gamma: float, lams: list[float]) -> None:
    """Ragged samples, masked tokens between own ones, a lambda per sample."""
    flat = [token for sample in samples for token in sample]
    mask = torch.tensor([made for made, *_ in flat], dtype=torch.bool)
    rewards = torch.tensor([r if made else 0.0 for made, r, _ in flat], dtype=torch.float64)
    values = torch.tensor([v if made else math.nan for made, _, v in flat], dtype=torch.float64)
    rows = torch.tensor([i for i, sample in enumerate(samples) for _ in sample], dtype=torch.int64)
    expected: tuple[list[float], list[float]] = ([], [])
    for sample, lam in zip(samples, lams, strict=False):
        made, r, v = (list(part) for part in zip(*sample, strict=True)) if sample else ([], [], [])
        for whole, part in zip(expected, reference(r, v, made, gamma, lam), strict=True):
            whole.extend(part)
    lam_column = torch.tensor(lams[: len(samples)], dtype=torch.float64)
    found = generalized_advantages(rewards, values, mask, rows, len(samples), gamma=gamma, lam=lam_column)
    assert found[0].tolist() == pytest.approx(expected[0], abs=1e-12)
    assert found[1].tolist() == pytest.approx(expected[1], abs=1e-12)


def test_tokens_of_the_environment_change_nothing() -> None:
    """A tool's answer between own tokens, of any length and with any values: the same advantages."""
    short = generalized_advantages(
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.3, 0.6]),
        torch.ones(2).bool(),
        torch.zeros(2).long(),
        1,
        gamma=0.9,
        lam=0.8,
    )
    mask = torch.tensor([False, True, False, False, True, False])
    values = torch.tensor([9.0, 0.3, 9.0, 9.0, 0.6, 9.0])
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    long = generalized_advantages(rewards, values, mask, torch.zeros(6).long(), 1, gamma=0.9, lam=0.8)
    for few, many in zip(short, long, strict=True):
        assert many[mask].tolist() == few.tolist() and many[~mask].tolist() == [0.0] * 4


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


def test_vapo_has_a_lambda_each() -> None:
    """Policy: lambda by length; critic: the sum of the rewards ahead, whatever the values say."""
    lengths, rewards = [30, 4], [1.0, -2.0]
    values = torch.linspace(-1, 1, 34, dtype=torch.float64)
    found = VAPO(whiten_advantages=False).compute(inputs(rewards, lengths, values))
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx([1.0] * 30 + [-2.0] * 4, abs=1e-12)
    expected = []
    for part, reward, lam in zip(values.split(lengths), rewards, [1 - 1 / (0.05 * 30), 0.0], strict=True):
        earned = [0.0] * (len(part) - 1) + [reward]
        expected += reference(earned, part.tolist(), [True] * len(part), 1.0, lam)[0]
    assert found.advantages.tolist() == pytest.approx(expected, abs=1e-12)


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
