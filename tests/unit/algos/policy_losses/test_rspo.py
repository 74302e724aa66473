"""RSPO's functions by hand; its record says what is missing."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import RSPO, router_shift_policy_loss, router_shift_ratio
from hybrid_rl.errors import NotYetSupportedError
from tests.unit.algos.policy_losses.samples import MASK, ROWS, columns, samples

# Two layers, two experts: |differences| .1, .3, .2, .6 with mean .3; 1, 1, 1, 1 with mean 1; none.
OLD = torch.full((3, 2, 2), -1.0, dtype=torch.float64)
MOVED = torch.tensor([[[0.1, -0.3], [0.2, -0.6]], [[1.0, -1.0], [-1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])


def test_shift_ratio_by_hand() -> None:
    """exp(-.3) = .740818; exp(-1) = .367879, which the floor .5 lifts; 1."""
    router = (OLD + MOVED).requires_grad_()
    ratio = router_shift_ratio(router, OLD, floor=0.5)
    assert ratio.tolist() == pytest.approx([0.740818, 0.5, 1.0], abs=5e-7) and not ratio.requires_grad
    assert router_shift_ratio(router, OLD, floor=0.1).tolist() == pytest.approx([0.740818, 0.367879, 1.0], abs=5e-7)


def test_loss_written_out() -> None:
    """The shift multiplies the ratio of each token, then one-sided clips and the geometric mean."""
    given = columns()
    shift = torch.linspace(0.3, 1.0, len(MASK), dtype=torch.float64, requires_grad=True)
    loss = router_shift_policy_loss(
        given["logprobs"],
        given["old_logprobs"],
        given["advantages"],
        MASK,
        ROWS,
        6,
        shift,
        epsilon=0.4,
        epsilon_high=0.4,
    )
    new, old, advantages = (given[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    for places in samples(given):
        product = 1.0
        for t in places:
            ratio = math.exp(new[t] - old[t]) * shift[t].item()
            product *= min(ratio, math.exp(0.4)) if advantages[t] > 0 else max(ratio, math.exp(-0.4))
        for t in places:
            expected = -advantages[t] * product ** (1 / len(places))
            assert loss.per_token[t].item() == pytest.approx(expected, rel=1e-12)
    loss.per_token[MASK].sum().backward()
    assert given["logprobs"].grad is not None and shift.grad is None


def test_the_record_says_what_is_missing() -> None:
    with pytest.raises(NotYetSupportedError, match="router scores .* does not record yet; use gmpo"):
        RSPO()


@pytest.mark.parametrize(
    ("router", "floor", "message"),
    [(OLD[:, 0], 0.5, r"must both be \[T, L, K\]"), (OLD[:1], 0.5, "must both be"), (OLD, 0.0, "floor=0.0 must be")],
)
def test_bad_arguments(router: torch.Tensor, floor: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router_shift_ratio(router, OLD, floor=floor)
