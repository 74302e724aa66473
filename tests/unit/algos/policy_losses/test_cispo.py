"""CISPO written out: the clipped weight is a constant, no gradient is lost."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import CISPO
from tests.unit.algos.policy_losses.samples import MASK, assert_is, columns, loss_and_gradient, loss_of, samples


@pytest.mark.parametrize(("low", "high"), [(None, 4.0), (None, 0.2), (0.3, 0.2)])
def test_written_out(low: float | None, high: float) -> None:
    """-clip(r) A ln p; its gradient is -clip(r) A, where that of the clipped surrogate is 0 or -r A."""
    given = columns()
    loss, gradient = loss_and_gradient(CISPO(epsilon=low, epsilon_high=high), given)
    new, old, advantages = (given[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    expected, num_clipped = [], 0
    for places in samples(given):
        for t in places:
            ratio = math.exp(new[t] - old[t])
            weight = min(ratio, 1 + high)
            if low is not None:
                weight = max(weight, 1 - low)
            num_clipped += weight != ratio
            expected.append((t, -weight * advantages[t] * new[t], -weight * advantages[t]))
    assert_is(loss, gradient, expected)
    assert int(loss.metrics["cispo_clip_ratio"][MASK].sum()) == num_clipped
    assert (num_clipped > 0) == (high == 0.2) and not loss.clipped_low.any() and not loss.clipped_high.any()


def test_one_token_by_hand() -> None:
    """r = 1.5, bound 1.2, A = 2, ln p = -3: loss 1.2 * 2 * 3 = 7.2, gradient -2.4 (PPO would have 0)."""
    logprob = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    old = logprob.detach() - math.log(1.5)
    loss = loss_of(
        CISPO(epsilon=0.2, epsilon_high=0.2),
        logprob,
        old,
        torch.tensor([2.0], dtype=torch.float64),
        torch.tensor([True]),
        torch.tensor([0]),
        1,
    )
    loss.per_token.sum().backward()
    assert logprob.grad is not None
    assert (loss.per_token.item(), logprob.grad.item()) == pytest.approx((7.2, -2.4), rel=1e-12)
