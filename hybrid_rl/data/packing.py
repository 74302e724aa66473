"""Splitting samples: into micro-batches under a token cap, and over ranks at equal cost."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybrid_rl.errors import ConfigError, DataError


def pack_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split samples into few micro-batches of at most `max_tokens` tokens each.

    Best-fit decreasing gives their number (at most 11/9 of the optimum + 1; Johnson 1974); then the samples are spread
    evenly over that many if the cap allows it, so that no micro-batch is larger than necessary.

    Args:
        lengths: [N] tokens of each sample, each >= 1.
        max_tokens: hard cap on the sum of a micro-batch.

    Returns:
        Micro-batches of sample indices, ascending within each; every index once; ordered by their first index. The
        result depends only on the arguments.

    Raises:
        DataError: a length is over the cap, below 1 or not a whole number.
        ConfigError: max_tokens is below 1.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens!r}; use at least 1")
    sizes = np.asarray(lengths)
    if sizes.size == 0:
        return []
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu":
        raise DataError(f"lengths has dims {sizes.shape} and dtype {sizes.dtype}; give one whole number per sample")
    shortest, longest = int(sizes.argmin()), int(sizes.argmax())
    if sizes[shortest] < 1:
        raise DataError(f"sample {shortest} has length {sizes[shortest]}; every sample needs at least 1 token")
    if sizes[longest] > max_tokens:
        num_over = int((sizes > max_tokens).sum())
        raise DataError(
            f"sample {longest} has {sizes[longest]} tokens, but max_tokens={max_tokens} ({num_over} sample(s) are over "
            f"it); samples are never split: raise max_tokens to at least {sizes[longest]}, or shorten prompts and "
            "completions"
        )
    tight = _best_fit_decreasing(sizes, max_tokens)
    even = _longest_first(sizes, len(tight))
    totals = [int(sizes[indices].sum()) for indices in even]
    # If an even spread does not fit, the micro-batches are nearly full anyway.
    return _in_order(even if max(totals) <= max_tokens else tight)


def balance(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Split items that must stay whole (groups of samples, say) over `num_bins` ranks at nearly equal total cost.

    Longest processing time first (Graham 1969): the largest total is at most 4/3 of the optimum, and two totals differ
    by at most the largest cost.

    Args:
        costs: [N] cost of each item, >= 0, in any unit.
        num_bins: number of ranks.

    Returns:
        `num_bins` lists of item indices, ascending within each; every index once. With fewer items than ranks some
        lists are empty. The result depends only on the arguments.

    Raises:
        DataError: a cost is negative or not finite.
        ConfigError: num_bins is below 1.
    """
    if num_bins < 1:
        raise ConfigError(f"num_bins={num_bins!r}; use at least 1")
    weights = np.asarray(costs, dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if bad.size:
        raise DataError(f"item {bad[0]} has cost {weights[bad[0]]}; costs must be finite and >= 0")
    return [sorted(indices) for indices in _longest_first(weights, num_bins)]


def _best_fit_decreasing(sizes: npt.NDArray[np.integer], max_tokens: int) -> list[list[int]]:
    """Put each sample, largest first, into the fullest bin that still has room for it."""
    num_samples, smallest = len(sizes), int(sizes.min())
    bins: list[list[int]] = []
    free: list[int] = []  # sorted: free tokens * num_samples + bin, one int per bin that can take another sample
    for index in np.argsort(-sizes.astype(np.int64), kind="stable").tolist():
        size = int(sizes[index])
        at = bisect_left(free, size * num_samples)
        if at == len(free):
            space, bin_ = max_tokens, len(bins)
            bins.append([])
        else:
            space, bin_ = divmod(free.pop(at), num_samples)
        bins[bin_].append(index)
        if space - size >= smallest:
            insort(free, (space - size) * num_samples + bin_)
    return bins


def _longest_first(costs: npt.NDArray[np.integer] | npt.NDArray[np.floating], num_bins: int) -> list[list[int]]:
    """Put each item, largest first, into the bin with the smallest total (then the fewest items, then the first)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap: list[tuple[float, int, int]] = [(0, 0, bin_) for bin_ in range(num_bins)]
    values = costs.tolist()
    for index in np.argsort(-costs.astype(np.float64), kind="stable").tolist():
        total, count, bin_ = heap[0]
        bins[bin_].append(index)
        heapq.heapreplace(heap, (total + values[index], count + 1, bin_))
    return bins


def _in_order(bins: list[list[int]]) -> list[list[int]]:
    return sorted(sorted(indices) for indices in bins if indices)
