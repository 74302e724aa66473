"""SAPO written out, with its gradient by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import SAPO
from tests.unit.algos.policy_losses.samples import MASK, assert_is, columns, loss_and_gradient, loss_of, samples


def test_written_out() -> None:
    """-(4 / tau) sigmoid(tau (r - 1)) A; d/d ln p = -r A / cosh^2(tau (r - 1) / 2)."""
    given = columns()
    loss, gradient = loss_and_gradient(SAPO(sapo_temperature_pos=0.8, sapo_temperature_neg=3.0), given)
    new, old, advantages = (given[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    expected = []
    for places in samples(given):
        for t in places:
            ratio, advantage = math.exp(new[t] - old[t]), advantages[t]
            tau = 0.8 if advantage > 0 else 3.0
            value = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
            expected.append((t, value, -ratio * advantage / math.cosh(tau * (ratio - 1) / 2) ** 2))
    assert_is(loss, gradient, expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        # sigmoid(1) = .7310586, 4 * .7310586 * .2689414 = .7864477, times the ratio 2
        (2.0, 1.0, -4 * 0.7310586, -2 * 0.7864477),
        (1.0, 1.0, -2.0, -1.0),
        # tau = 1.05: 4 / 1.05 / 2 = 1.9047619; a zero advantage has a zero loss
        (1.0, -1.0, 1.9047619, 1.0),
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_papers_temperatures_by_hand(ratio: float, advantage: float, value: float, slope: float) -> None:
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    loss = loss_of(
        SAPO(),
        logprob,
        logprob.detach() - math.log(ratio),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([True]),
        torch.tensor([0]),
        1,
    )
    loss.per_token.sum().backward()
    assert logprob.grad is not None
    assert (loss.per_token.item(), logprob.grad.item()) == pytest.approx((value, slope), abs=5e-7)


def test_the_gate_closes_smoothly_and_faster_for_negative_advantages() -> None:
    given = columns()
    given["old_logprobs"] = given["logprobs"].detach() - 1.0
    loss, _ = loss_and_gradient(SAPO(), given)
    gate = loss.metrics["sapo/gate"][MASK]
    positive = given["advantages"][MASK] > 0
    assert 0 < gate[~positive].max() < gate[positive].min() < 1


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_beyond_float32_meets_a_closed_gate(advantage: float) -> None:
    """-4 / tau times A, and no gradient: it was 0 * inf."""
    logprob = torch.tensor([-1.0], requires_grad=True)
    loss = loss_of(
        SAPO(),
        logprob,
        torch.tensor([-90.0]),
        torch.tensor([advantage]),
        torch.tensor([True]),
        torch.tensor([0]),
        1,
    )
    loss.per_token.sum().backward()
    assert logprob.grad is not None
    expected = -4.0 * advantage if advantage > 0 else -4 / 1.05 * advantage
    assert (loss.per_token.item(), logprob.grad.item()) == pytest.approx((expected, 0.0), rel=1e-6)
