"""RSPO's functions by hand, and its record by them."""

from __future__ import annotations

import pytest
import torch

from hybrid_rl.algos.policy_losses import GMPO, RSPO
from hybrid_rl.algos.policy_losses.gmpo import router_shift_ratio
from tests.unit.algos.policy_losses.samples import MASK, columns, loss_and_gradient

# Two layers, two experts: |differences| .1, .3, .2, .6 with mean .3; 1, 1, 1, 1 with mean 1; none.
OLD = torch.full((3, 2, 2), -1.0, dtype=torch.float64)
MOVED = torch.tensor([[[0.1, -0.3], [0.2, -0.6]], [[1.0, -1.0], [-1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])


def test_shift_ratio_by_hand() -> None:
    """exp(-.3) = .740818; exp(-1) = .367879, which the floor .5 lifts; 1."""
    router = (OLD + MOVED).requires_grad_()
    ratio = router_shift_ratio(router, OLD, floor=0.5)
    assert ratio.tolist() == pytest.approx([0.740818, 0.5, 1.0], abs=5e-7) and not ratio.requires_grad
    assert router_shift_ratio(router, OLD, floor=0.1).tolist() == pytest.approx([0.740818, 0.367879, 1.0], abs=5e-7)


def test_where_routers_stand_still_it_is_gmpo() -> None:
    given, scores = columns(), torch.linspace(-3, -0.2, len(MASK) * 6, dtype=torch.float64).view(-1, 3, 2)
    mine = loss_and_gradient(RSPO(), given, router_logprobs=scores, old_router_logprobs=scores)
    theirs = loss_and_gradient(GMPO(), given)
    assert torch.equal(mine[0].per_token, theirs[0].per_token) and torch.equal(mine[1], theirs[1])
    assert RSPO().epsilon == GMPO().epsilon and RSPO().needs == {"router_scores"}
    with pytest.raises(ValueError, match="the column old_router_logprobs is None"):
        loss_and_gradient(RSPO(), given, router_logprobs=scores)


@pytest.mark.parametrize(
    ("router", "floor", "message"),
    [(OLD[:, 0], 0.5, r"must both be \[T, L, K\]"), (OLD[:1], 0.5, "must both be"), (OLD, 0.0, "floor=0.0 must be")],
)
def test_bad_arguments(router: torch.Tensor, floor: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router_shift_ratio(router, OLD, floor=floor)
