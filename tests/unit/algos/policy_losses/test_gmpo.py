"""GMPO written out: one-sided clips in log space, then the geometric mean."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos import LossInputs
from hybrid_rl.algos.policy_losses import GMPO, Clip
from tests.unit.algos.policy_losses.samples import MASK, assert_is, columns, loss_and_gradient, loss_of, samples


@pytest.mark.parametrize("high", [None, 0.1])
def test_written_out(high: float | None) -> None:
    given = columns()
    loss, gradient = loss_and_gradient(GMPO(epsilon=0.4, epsilon_high=high), given)
    new, old, advantages = (given[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    expected, low_places, high_places = [], set(), set()
    for places in samples(given):
        total, free = 0.0, []
        for t in places:
            log_ratio, bound = new[t] - old[t], 0.4 if high is None else high
            if advantages[t] > 0 and log_ratio > bound:
                total += bound
                high_places.add(t)
            elif advantages[t] <= 0 and log_ratio < -0.4:
                total -= 0.4
                low_places.add(t)
            else:
                total += log_ratio
                free.append(t)
        for t in places:
            mean = math.exp(total / len(places))
            # The completion's value at each of |y| tokens, each of which moves it by 1 / |y|.
            expected.append((t, -advantages[t] * mean, -advantages[t] * mean if t in free else 0.0))
    assert_is(loss, gradient, expected)
    assert low_places and high_places
    for places in samples(given):
        for t in places:
            mean = math.exp(sum(new[t] - old[t] for t in places) / len(places))
            assert loss.weight[t].item() == loss.ratio[t].item() == pytest.approx(mean, rel=1e-12)
    assert set(torch.where(loss.clipped_low & MASK)[0].tolist()) == low_places
    assert set(torch.where(loss.clipped_high & MASK)[0].tolist()) == high_places


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


def test_within_the_bounds_it_is_gspo() -> None:
    given = columns(spread=0.3)
    ours, slopes = loss_and_gradient(GMPO(), given)
    theirs, expected = loss_and_gradient(Clip(epsilon=0.9, importance_sampling_level="sequence"), given)
    torch.testing.assert_close(ours.per_token[MASK], theirs.per_token[MASK], rtol=1e-12, atol=0)
    torch.testing.assert_close(slopes, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.weight[MASK], theirs.weight[MASK], rtol=1e-12, atol=0)


def test_a_shift_is_part_of_the_ratio() -> None:
    given = columns()
    shift = torch.linspace(-0.5, 0.1, len(MASK), dtype=torch.float64)
    inputs = LossInputs(**given, num_rows=6)
    shifted = GMPO().geometric_mean(inputs, inputs.log_ratio + inputs.kept(shift))
    moved, _ = loss_and_gradient(GMPO(), {**given, "old_logprobs": given["old_logprobs"] - shift})
    torch.testing.assert_close(shifted.per_token[MASK], moved.per_token[MASK], rtol=1e-12, atol=0)
