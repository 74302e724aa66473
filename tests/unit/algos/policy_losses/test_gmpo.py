"""GMPO by hand: one-sided clips in log space, then the geometric mean."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import GMPO, Clip
from tests.unit.algos.policy_losses.samples import MASK, columns, loss_and_gradient, loss_of


def test_one_completion_by_hand() -> None:
    """ln r = 1, .1, -1 and A = 2: the first is cut at .4, exp(-.5 / 3) = .846482, times -2; with A = -2 the last is
    cut, exp(.7 / 3) = 1.262802, times 2."""
    old = torch.tensor([-2.0, -1.1, -1.0], dtype=torch.float64)
    mask, rows = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    for advantage, value, clipped in ((2.0, -2 * 0.846482, 0), (-2.0, 2 * 1.262802, 2)):
        logprobs = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
        loss = loss_of(GMPO(), logprobs, old, torch.full((3,), advantage).double(), mask, rows, 1)
        assert loss.per_token.tolist() == pytest.approx([value] * 3, abs=2e-6)
        (gradient,) = torch.autograd.grad(loss.per_token.mean(), logprobs)
        assert [gradient[t].item() == 0 for t in range(3)] == [t == clipped for t in range(3)]
        side = loss.clipped_high if advantage > 0 else loss.clipped_low
        assert torch.equal(loss.clipped_low | loss.clipped_high, side) and side.nonzero().tolist() == [[clipped]]
        assert loss.weight.tolist() == loss.ratio.tolist() == pytest.approx([math.exp(0.1 / 3)] * 3, rel=1e-12)


def test_within_the_bounds_it_is_gspo() -> None:
    given = columns(spread=0.3)
    ours, slopes = loss_and_gradient(GMPO(), given)
    theirs, expected = loss_and_gradient(Clip(epsilon=0.9, importance_sampling_level="sequence"), given)
    torch.testing.assert_close(ours.per_token[MASK], theirs.per_token[MASK], rtol=1e-12, atol=0)
    torch.testing.assert_close(slopes, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.weight[MASK], theirs.weight[MASK], rtol=1e-12, atol=0)
