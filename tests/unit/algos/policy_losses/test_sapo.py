"""SAPO and its gradient by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import SAPO
from tests.unit.algos.policy_losses.samples import MASK, columns, loss_and_gradient, loss_of


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
