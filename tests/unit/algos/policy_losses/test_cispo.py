"""CISPO by hand: the clipped weight is a constant, no gradient is lost."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import CISPO
from tests.unit.algos.policy_losses.samples import loss_of


@pytest.mark.parametrize(
    ("ratio", "low", "weight"), [(1.5, 0.2, 1.2), (1.1, 0.2, 1.1), (0.5, 0.2, 0.8), (0.5, None, 0.5)]
)
def test_one_token_by_hand(ratio: float, low: float | None, weight: float) -> None:
    """A = 2, ln p = -3: the loss is 6 times the clipped weight, its gradient -2 times; at r = 1.5 PPO would have 0."""
    logprob = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    one = torch.zeros(1, dtype=torch.int64)
    advantage = torch.tensor([2.0], dtype=torch.float64)
    record = CISPO(epsilon=low, epsilon_high=0.2)
    loss = loss_of(record, logprob, logprob.detach() - math.log(ratio), advantage, one == 0, one, 1)
    loss.per_token.sum().backward()
    assert logprob.grad is not None
    assert (loss.per_token.item(), logprob.grad.item()) == pytest.approx((6 * weight, -2 * weight), rel=1e-12)
    assert loss.metrics["cispo_clip_ratio"].tolist() == [float(weight != ratio)]
    assert not loss.clipped_low.any() and not loss.clipped_high.any()
