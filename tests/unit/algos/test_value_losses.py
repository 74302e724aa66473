"""The critic's loss by hand and as a sum over micro-batches; how much of the returns values explain."""

from __future__ import annotations

import random
from functools import reduce
from itertools import pairwise
from operator import add

import pytest
import torch
from torch import Tensor

from hybrid_rl.algos import token_weights
from hybrid_rl.algos.value_losses import ValueFit, clipped_value_loss, value_clipped


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# V_old = 1. c = 0.2: the band is 0.8 to 1.2.
@pytest.mark.parametrize(
    ("value", "target", "clip", "loss", "slope"),
    [
        (1.1, 2.0, 0.2, 0.405, -0.9),  # inside the band: the plain square
        (1.5, 2.0, 0.2, 0.32, 0.0),  # beyond it, towards the return: (1.2 - 2)^2 / 2, no gradient
        (1.5, 1.0, 0.2, 0.125, 0.5),  # beyond it, away from the return: pulled back
        (0.5, 0.0, 0.2, 0.32, 0.0),
        (0.5, 1.0, 0.2, 0.125, -0.5),
        (1.2, 2.0, 0.2, 0.32, -0.8),  # on its edge
        (2.0, 1.75, 0.5, 0.03125, 0.25),  # a tie of both squares
        (1.5, 2.0, None, 0.125, -0.5),
    ],
)
def test_one_token(value: float, target: float, clip: float | None, loss: float, slope: float) -> None:
    values = column(value).requires_grad_()
    per_token = clipped_value_loss(values, column(1.0), column(target), clip)
    per_token.sum().backward()
    assert values.grad is not None
    assert (per_token.item(), values.grad.item()) == pytest.approx((loss, slope), rel=1e-9, abs=1e-12)
    assert value_clipped(values, column(1.0), column(target), clip).item() == (slope == 0)


def test_the_loop_gives_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    values, old, returns = torch.randn(3, 200, dtype=torch.float64, generator=generator)
    expected = []
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        bounded = min(max(v, o - 0.5), o + 0.5)
        expected.append(0.5 * max((v - r) ** 2, (bounded - r) ** 2))
    assert clipped_value_loss(values, old, returns, 0.5).tolist() == pytest.approx(expected, rel=1e-12)


def test_gradients_flow_through_values_only() -> None:
    values, old, returns = (torch.zeros(2, requires_grad=True) for _ in range(3))
    clipped_value_loss(values, old, returns + 1, 0.2).sum().backward()
    assert values.grad is not None and old.grad is None and returns.grad is None


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
def test_the_loss_does_not_grow_with_the_number_of_micro_batches(num_micro_batches: int) -> None:
    """A mean of each micro-batch summed up would be 1, 2, 4, 8 times the loss: weights come from global counts."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 9, (8,), generator=generator)
    rows = torch.repeat_interleave(torch.arange(8), lengths)
    total = len(rows)
    old, returns = torch.randn(2, total, generator=generator, dtype=torch.float64)
    values = torch.randn(total, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.rand(total, generator=generator) < 0.8
    num_tokens = int(mask.sum())
    expected = sum(
        0.5 * max((v - r) ** 2, (min(max(v, o - 0.2), o + 0.2) - r) ** 2)
        for v, o, r, m in zip(values.tolist(), old.tolist(), returns.tolist(), mask.tolist(), strict=True)
        if m
    ) / max(num_tokens, 1)
    loss = values.new_zeros(())
    cuts = [8 * i // num_micro_batches for i in range(num_micro_batches + 1)]
    for first, last in pairwise(cuts):
        mine = (rows >= first) & (rows < last)
        per_token = clipped_value_loss(values[mine], old[mine], returns[mine], 0.2)
        weights = token_weights(
            mask[mine],
            rows[mine] - first,
            last - first,
            "dapo",
            num_tokens=num_tokens,
            num_trajectories=8,
            max_completion_length=8,
        )
        loss = loss + (weights.double() * per_token).sum()
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def explained(values: list[float], returns: list[float]) -> float:
    """1 - Var(R - V) / Var(R), written out."""

    def variance(numbers: list[float]) -> float:
        mean = sum(numbers) / len(numbers)
        return sum((n - mean) ** 2 for n in numbers) / len(numbers)

    return 1 - variance([r - v for v, r in zip(values, returns, strict=True)]) / variance(returns)


def test_explained_variance_by_hand() -> None:
    """Returns 0, 2, 4: variance 8/3. Errors 0, 1, -1 have 2/3: 3/4 is explained."""
    returns, yes = column(0, 2, 4), torch.tensor([True] * 3)
    assert ValueFit.of(column(0, 1, 5), returns, yes).explained_variance == pytest.approx(0.75, rel=1e-12)
    assert ValueFit.of(returns + 3, returns, yes).explained_variance == pytest.approx(1.0, rel=1e-12)
    assert ValueFit.of(column(7, 7, 7), returns, yes).explained_variance == pytest.approx(0.0, abs=1e-12)
    assert ValueFit.of(-returns, returns, yes).explained_variance == pytest.approx(-3.0, rel=1e-12)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_parts_add_up_in_any_order(offset: float) -> None:
    """Far from zero as well, where sums of squares would lose their digits."""
    generator = torch.Generator().manual_seed(5)
    values, returns = torch.randn(2, 100, dtype=torch.float64, generator=generator) + offset
    mask = torch.rand(100, generator=generator) < 0.7
    parts = [
        ValueFit.of(values[first:last], returns[first:last], mask[first:last])
        for first, last in pairwise([0, 0, 1, 17, 60, 100])
    ]
    random.Random(1).shuffle(parts)
    kept = [(v, r) for v, r, m in zip(values.tolist(), returns.tolist(), mask.tolist(), strict=True) if m]
    expected = explained([v for v, _ in kept], [r for _, r in kept])
    assert reduce(add, parts, ValueFit()).explained_variance == pytest.approx(expected, rel=1e-9)
    assert ValueFit.of(values, returns, mask).explained_variance == pytest.approx(expected, rel=1e-9)


def test_masked_tokens_do_not_count() -> None:
    mask = torch.tensor([True, False, True, True])
    fit = ValueFit.of(column(0, float("nan"), 1, 5), column(0, float("inf"), 2, 4), mask)
    assert fit.count == 3 and fit.explained_variance == pytest.approx(0.75, rel=1e-12)


def test_nothing_to_explain_is_nan() -> None:
    no = torch.zeros(2, dtype=torch.bool)
    fits = [ValueFit(), ValueFit.of(column(1, 2), column(1, 2), no), ValueFit.of(column(1, 2), column(3, 3), ~no)]
    assert all(fit.explained_variance != fit.explained_variance for fit in [*fits, fits[0] + fits[1]])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        clipped_value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3), 0.2)
    with pytest.raises(ValueError, match="clip=0.0 would stop the critic"):
        clipped_value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), 0.0)
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        ValueFit.of(torch.zeros(2), torch.zeros(2), torch.ones(2, 1, dtype=torch.bool))
