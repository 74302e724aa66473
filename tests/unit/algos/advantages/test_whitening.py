"""Normalisation over ranks: Python's statistics, an exact zero, and digits that survive."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hybrid_rl.algos.advantages import whitened
from hybrid_rl.algos.interface import alone
from tests.unit.algos.advantages.ranks import on_ranks


def test_by_hand() -> None:
    """1 2 3 without the 9: mean 2, variance 1."""
    result = whitened(torch.tensor([1.0, 9.0, 2.0, 3.0]), torch.tensor([True, False, True, True]), alone)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx([-1 / math.sqrt(1 + 1e-8), 0, 0, 1 / math.sqrt(1 + 1e-8)], rel=1e-15)


@pytest.mark.parametrize("cuts", [[50], [20, 30], [0, 1, 49], [10, 0, 15, 25]])
def test_ranks_give_what_one_gives(cuts: list[int]) -> None:
    """Values around 1e6, where sums of squares in float64 keep four digits of a variance of 1."""
    values = 1e6 + torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keep = torch.arange(50) % 7 != 0
    kept = values[keep].tolist()
    deviation = math.sqrt(statistics.variance(kept) + 1e-8)
    expected = [
        (v - statistics.fmean(kept)) / deviation if k else 0.0 for v, k in zip(values.tolist(), keep, strict=True)
    ]
    parts = list(zip(values.split(cuts), keep.split(cuts), strict=True))
    found = on_ranks(len(cuts), lambda rank, gather: whitened(*parts[rank], gather))
    assert torch.cat(found).tolist() == pytest.approx(expected, abs=1e-9)


def test_equal_values_are_exactly_zero() -> None:
    """Equal on each rank, but not to the other rank's: not zero."""
    values, keep = torch.full((7,), 0.1, dtype=torch.float64), torch.ones(7, dtype=torch.bool)
    assert whitened(values, keep, alone).tolist() == [0.0] * 7
    assert torch.cat(on_ranks(3, lambda _, gather: whitened(values, keep, gather))).tolist() == [0.0] * 21
    differ = on_ranks(2, lambda rank, gather: whitened(values + rank, keep, gather))
    assert bool((differ[0] < 0).all()) and bool((differ[1] > 0).all())


def test_too_few_values() -> None:
    one = whitened(torch.tensor([3.0, 5.0]), torch.tensor([True, False]), alone)
    assert one.tolist() == [0.0, 0.0] and whitened(torch.zeros(0), torch.zeros(0).bool(), alone).tolist() == []
    with pytest.raises(ValueError, match=r"must be \[K\]"):
        whitened(torch.zeros(3), torch.zeros(2).bool(), alone)
