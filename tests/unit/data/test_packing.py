"""Micro-batches never exceed their cap and are few; ranks get near-equal work."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.data.packing import balance, pack_by_tokens
from hybrid_rl.errors import ConfigError, DataError

LENGTHS_AND_CAP = st.integers(1, 200).flatmap(
    lambda cap: st.tuples(st.lists(st.integers(1, cap), max_size=80), st.just(cap))
)
SMALL = st.integers(2, 12).flatmap(
    lambda cap: st.tuples(st.lists(st.integers(1, cap), min_size=1, max_size=6), st.just(cap))
)


def totals(bins: list[list[int]], sizes: list[int]) -> list[int]:
    return [sum(sizes[index] for index in indices) for indices in bins]


def fewest_bins(lengths: list[int], cap: int) -> int:
    """By trying every assignment."""
    for num_bins in range(1, len(lengths) + 1):
        for assignment in product(range(num_bins), repeat=len(lengths)):
            if all(sum(s for s, b in zip(lengths, assignment, strict=True) if b == i) <= cap for i in range(num_bins)):
                return num_bins
    raise AssertionError("a sample is over the cap")


@given(LENGTHS_AND_CAP)
def test_hard_cap_and_every_index_once(case: tuple[list[int], int]) -> None:
    lengths, cap = case
    bins = pack_by_tokens(lengths, cap)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert all(total <= cap for total in totals(bins, lengths))
    assert all(indices and indices == sorted(indices) for indices in bins)
    assert [indices[0] for indices in bins] == sorted(indices[0] for indices in bins)
    assert bins == pack_by_tokens(np.asarray(lengths, dtype=np.int32) if lengths else [], cap)


@given(SMALL)
def test_nearly_as_few_as_possible(case: tuple[list[int], int]) -> None:
    lengths, cap = case
    best = fewest_bins(lengths, cap)
    assert len(pack_by_tokens(lengths, cap)) <= 11 / 9 * best + 6 / 9


def test_hand_computed_packing() -> None:
    # 24 tokens under a cap of 12: 7+5 and 6+3+3 is the only way with two.
    assert pack_by_tokens([3, 7, 6, 5, 3], 12) == [[0, 2, 4], [1, 3]]
    assert pack_by_tokens([], 8) == []
    assert pack_by_tokens([8, 8], 8) == [[0], [1]]


def test_totals_are_evened_out() -> None:
    # Best fit alone gives 10 and 2; two bins of 6 do as well.
    assert totals(pack_by_tokens([2] * 6, 10), [2] * 6) == [6, 6]
    # Longest-first would need a total of 10 (5 + 3, then 4 + 3 + 3); only best fit finds 9 and 9.
    assert pack_by_tokens([5, 4, 3, 3, 3], 9) == [[0, 1], [2, 3, 4]]


def test_a_hundred_thousand_samples_use_no_more_than_needed() -> None:
    lengths = np.random.default_rng(0).integers(1, 2048, size=100_000)
    bins = pack_by_tokens(lengths, 8192)
    sums = [int(lengths[indices].sum()) for indices in bins]
    assert max(sums) <= 8192
    assert len(bins) == math.ceil(lengths.sum() / 8192)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 9, 12], r"sample 2 has 12 tokens, but max_tokens=8 \(2 sample\(s\) .*raise max_tokens to at least 12"),
        ([3, 0], "sample 1 has length 0"),
        ([3, -1], "sample 1 has length -1"),
        ([3.0], "dtype float64"),
        ([[3]], r"dims \(1, 1\)"),
    ],
)
def test_unusable_lengths(lengths: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pack_by_tokens(lengths, 8)


def test_unusable_bins() -> None:
    with pytest.raises(ConfigError, match="max_tokens=0"):
        pack_by_tokens([1], 0)
    with pytest.raises(ConfigError, match="num_bins=0"):
        balance([1], 0)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 8))
def test_balance_bounds_the_gap(costs: list[int], num_bins: int) -> None:
    bins = balance(costs, num_bins)
    assert len(bins) == num_bins
    assert sorted(index for indices in bins for index in indices) == list(range(len(costs)))
    assert all(indices == sorted(indices) for indices in bins)
    sums = totals(bins, costs)
    assert max(sums) - min(sums) <= max(costs, default=0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_balance_is_within_graham_of_the_optimum(costs: list[int], num_bins: int) -> None:
    best = min(
        max(sum(c for c, b in zip(costs, assignment, strict=True) if b == i) for i in range(num_bins))
        for assignment in product(range(num_bins), repeat=len(costs))
    )
    assert max(totals(balance(costs, num_bins), costs)) <= (4 / 3 - 1 / (3 * num_bins)) * best + 1e-9


def test_hand_computed_balance() -> None:
    assert balance([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]
    assert balance([], 2) == [[], []]
    assert [len(indices) for indices in balance([0.0] * 6, 3)] == [2, 2, 2]  # no cost: equal counts


def test_unusable_costs() -> None:
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="item 1 has cost"):
            balance([1.0, cost], 2)
