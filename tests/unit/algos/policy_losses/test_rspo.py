"""RSPO's functions by hand, and its record by them."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rl.algos.policy_losses import GMPO, RSPO
from hybrid_rl.algos.policy_losses.gmpo import router_shift_ratio
from tests.unit.algos.policy_losses.samples import MASK, WILD, Columns, columns, loss_and_gradient, part, samples

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
    now = shift.log()[:, None, None]
    scores = {"router_logprobs": now, "old_router_logprobs": torch.zeros_like(now).detach()}
    loss, _ = loss_and_gradient(RSPO(router_shift_floor=0.2), given, **scores)
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


def routers() -> Columns:
    """Scores of 3 layers and 2 experts that move less from one token to the next; the last token's not at all."""
    old = torch.linspace(-3, -0.2, len(MASK) * 6, dtype=torch.float64).view(-1, 3, 2)
    size = torch.linspace(1.0, 0.0, len(MASK), dtype=torch.float64)[:, None, None]
    signs = torch.tensor([[1.0, -0.5], [-0.2, 0.4], [0.0, -0.9]], dtype=torch.float64)  # mean of the sizes: .5
    return {"router_logprobs": old + size * signs, "old_router_logprobs": old}


@pytest.mark.parametrize("floor", [0.8, 0.65])
def test_the_record_written_out(floor: float) -> None:
    """exp(-.5 s) with the floor, one-sided clips in log space, a geometric mean; the gradient is that of logprobs only
    and 0 at clipped tokens."""
    given, scores = columns(), routers()
    scores["router_logprobs"].requires_grad_()
    record = RSPO(epsilon=0.3, epsilon_high=0.05, router_shift_floor=floor)
    loss, gradient = loss_and_gradient(record, given, **scores)
    new, old, advantages = (given[name].tolist() for name in ("logprobs", "old_logprobs", "advantages"))
    shifts = [max(floor, math.exp(-0.5 * (1 - t / (len(MASK) - 1)))) for t in range(len(MASK))]
    assert shifts[0] == floor < shifts[-2] < shifts[-1] == 1.0
    for places in samples(given):
        logs = {t: new[t] - old[t] + math.log(shifts[t]) for t in places}
        kept = {t: min(x, 0.05) if advantages[t] > 0 else max(x, -0.3) for t, x in logs.items()}
        for t in places:
            value = -advantages[t] * math.exp(sum(kept.values()) / len(places))
            assert loss.per_token[t].item() == pytest.approx(value, rel=1e-12)
            slope = value if kept[t] == logs[t] else 0.0  # |y| tokens have the value, each moved by 1 / |y| of it
            assert gradient[t].item() == pytest.approx(slope, rel=1e-12, abs=1e-15)
    assert loss.metrics["router_shift/mean"].tolist() == pytest.approx(shifts, rel=1e-12)
    assert not loss.metrics["router_shift/mean"].requires_grad and scores["router_logprobs"].grad is None


def test_where_routers_stand_still_it_is_gmpo() -> None:
    given, scores = columns(), routers()
    still = dict.fromkeys(scores, scores["old_router_logprobs"])
    mine, theirs = loss_and_gradient(RSPO(), given, **still), loss_and_gradient(GMPO(), given)
    assert torch.equal(mine[0].per_token, theirs[0].per_token) and torch.equal(mine[1], theirs[1])
    assert RSPO().epsilon == GMPO().epsilon and RSPO().needs == {"router_scores"}


def test_cuts_and_masked_tokens_change_nothing() -> None:
    given, scores = columns(), routers()
    scores["router_logprobs"][WILD] = torch.nan
    loss, gradient = loss_and_gradient(RSPO(), given, **scores)
    assert loss.per_token[MASK].isfinite().all() and gradient.isfinite().all() and not gradient[~MASK].any()
    for chosen in ([0], [5, 2], [3, 1, 5, 0, 4, 2]):
        some, places = part(given, chosen)
        got, slopes = loss_and_gradient(RSPO(), some, **{name: column[places] for name, column in scores.items()})
        kept = some["mask"]
        torch.testing.assert_close(got.per_token[kept], loss.per_token[places][kept], rtol=1e-12, atol=0)
        torch.testing.assert_close(slopes, gradient[places], rtol=1e-12, atol=1e-15)


def test_scores_must_be_there() -> None:
    with pytest.raises(ValueError, match="the column old_router_logprobs is None"):
        loss_and_gradient(RSPO(), columns(), router_logprobs=routers()["router_logprobs"])


@pytest.mark.parametrize(
    ("router", "floor", "message"),
    [(OLD[:, 0], 0.5, r"must both be \[T, L, K\]"), (OLD[:1], 0.5, "must both be"), (OLD, 0.0, "floor=0.0 must be")],
)
def test_bad_arguments(router: torch.Tensor, floor: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router_shift_ratio(router, OLD, floor=floor)
