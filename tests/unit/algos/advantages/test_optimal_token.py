"""The optimal token baseline: by hand, and against the true norm of a gradient."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos import AdvantageInputs
from hybrid_rl.algos.advantages import OptimalTokenBaseline

NAN = math.nan


def found(samples: list[dict[str, list[float]]], rewards: list[float], groups: list[int]) -> list[float]:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([value for sample in samples for value in sample[name]], dtype=torch.float64)

    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups),
        rows=torch.tensor([i for i, sample in enumerate(samples) for _ in sample["made"]]),
        mask=column("made").bool(),
        token_rewards=column("token"),
        logprobs=column("p").log(),
        sum_pi_squared=column("squares"),
    )
    return OptimalTokenBaseline().compute(inputs).advantages.tolist()


def test_by_hand() -> None:
    """Energies .5 and 1 at the first step, .5 and 0 at the second: baselines 1/3 and 1/2 of rewards 1 and 0; the third
    step has one sample."""
    samples = [
        {"made": [1, 1, 1], "token": [0.0] * 3, "p": [0.5, 0.5, 0.5], "squares": [0.5, 0.5, 0.5]},
        {"made": [1, 0, 1], "token": [0.0] * 3, "p": [0.25, 0.9, 0.75], "squares": [0.5, 0.1, 0.5]},
    ]
    expected = [2 / 3, 0.5, 0.0, -1 / 3, 0.0, -0.5]
    assert found(samples, [1.0, 0.0], [4, 4]) == pytest.approx(expected, abs=1e-7)


def test_energy_is_the_norm_of_the_gradient_of_the_logits() -> None:
    """Two samples of one step: the baseline weighs by |d ln p / d logits|^2."""
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.2, 0.1, 2.0]], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(1)
    chosen = logprobs[[0, 1], [2, 0]]
    (gradient,) = torch.autograd.grad(chosen.sum(), logits)
    energy = (gradient**2).sum(1).tolist()
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]),
        groups=torch.tensor([0, 0]),
        rows=torch.arange(2),
        mask=torch.ones(2, dtype=torch.bool),
        token_rewards=torch.zeros(2),
        logprobs=chosen.detach(),
        sum_pi_squared=(logprobs.detach().exp() ** 2).sum(1),
    )
    advantages = OptimalTokenBaseline().compute(inputs).advantages
    baseline = energy[0] / sum(energy)
    assert advantages.tolist() == pytest.approx([1 - baseline, -baseline], rel=1e-7)


def test_a_certain_policy_has_the_plain_mean() -> None:
    """p = 1 everywhere: no energy at all, and below 0, where rounding of the columns puts it, is none either."""
    samples = [{"made": [1.0], "token": [0.0], "p": [1.0], "squares": [square]} for square in (1.0, 1.0 - 1e-7)]
    assert found(samples, [1.0, 0.0], [0, 0]) == pytest.approx([0.5, -0.5], rel=1e-12)


def test_equal_rewards_are_exactly_zero() -> None:
    samples = [{"made": [1, 1], "token": [0.0, 0.0], "p": [0.1 + i / 9, 0.3], "squares": [0.3, 0.4]} for i in range(7)]
    assert found(samples, [0.1] * 7, [0] * 7) == [0.0] * 14
