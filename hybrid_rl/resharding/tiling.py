"""Proof that copies and constants write every element of an engine's tensors exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Column, Table
from hybrid_rl.resharding.pieces import join_dims, spread
from hybrid_rl.resharding.trace import DestinationSpec, Trace


@dataclass(frozen=True)
class _Writes(Table):
    """Writes to memory. destination, offset [R]; shape, strides [R, D], largest stride first."""

    destination: Column
    offset: Column
    shape: Column
    strides: Column


def check_tiling(trace: Trace) -> None:
    """Raise HandoffError unless each element of each destination is written exactly once, and nothing else; and those
    that are untraced, which are written in another way, not at all.

    Exact for any shapes and strides (padded, fused, stacked and transposed destinations) and any order of the writes.
    """
    copies, fills, destinations = trace.copies, trace.fills, trace.destinations
    writes = _Writes.join(
        [
            _ordered(copies.destination, copies.offset, copies.high - copies.low, copies.strides),
            _ordered(fills.destination, fills.offset, fills.shape, fills.strides),
        ]
    )
    writes = writes.select(writes.shape.prod(axis=1) > 0)
    memory = _memory(destinations)
    elsewhere = np.array([spec.name in trace.untraced for spec in destinations], dtype=bool)
    wrong = []
    for index in np.flatnonzero(~_is_row_of_runs(writes, memory) | elsewhere).tolist():
        rows = writes.select(np.flatnonzero(writes.destination == index))
        if elsewhere[index]:
            problem = f"{len(rows)} copies write it, though it is loaded in another way" if len(rows) else None
        else:
            problem = _problem(rows, memory.select([index]))
        if problem:
            wrong.append(f"{destinations[index].name} {list(destinations[index].shape)}: {problem}")
    if wrong:
        raise HandoffError(
            f"the weights for the engine are not complete: {len(wrong)} of its {len(destinations)} tensors, "
            f"e.g. {'; '.join(wrong[:3])}. Trainer and engine must be built from one config; is the model supported?"
        )


def _ordered(destination: Column, offset: Column, shape: Column, strides: Column) -> _Writes:
    """Sort writes in the order of memory, and merge neighbouring dims that are contiguous."""
    strides = np.where(shape == 1, 0, strides)
    order = np.argsort(-strides, axis=1, kind="stable")
    shape, strides = np.take_along_axis(shape, order, axis=1), np.take_along_axis(strides, order, axis=1)
    join_dims(shape, [strides])
    return _Writes(destination, offset, shape, strides)


def _memory(destinations: Sequence[DestinationSpec]) -> _Writes:
    """Return the elements of the destinations, one row each."""
    num_dims = max([MAX_DIMS, *(len(spec.shape) for spec in destinations)])
    shape = np.ones((len(destinations), num_dims), dtype=np.int64)
    strides = np.zeros_like(shape)
    for index, spec in enumerate(destinations):
        shape[index, : len(spec.shape)] = spec.shape
        strides[index, : len(spec.shape)] = spec.strides
    return _ordered(np.arange(len(destinations)), np.zeros(len(destinations), dtype=np.int64), shape, strides)


def _is_row_of_runs(writes: _Writes, memory: _Writes) -> Column:
    """Return which destinations are contiguous and written in contiguous stretches, one after the other: bool
    [destinations].

    Nearly all are; the others are counted element by element.
    """
    length = memory.shape.prod(axis=1)
    good = _is_run(memory)
    good &= np.bincount(writes.destination, ~_is_run(writes), minlength=len(length)) == 0
    order = np.lexsort((writes.offset, writes.destination))
    destination, begin = writes.destination[order], writes.offset[order]
    end = begin + writes.shape.prod(axis=1)[order]
    # Each stretch begins where the previous one ends, the first one at 0; the last one ends at the length.
    starts = np.diff(destination, prepend=-1) != 0
    expected = np.where(starts, 0, np.concatenate([end[:1], end[:-1]]))
    good &= np.bincount(destination, begin != expected, minlength=len(length)) == 0
    reached = np.zeros_like(length)
    reached[destination] = end  # the last one stays
    return good & (reached == length)


def _is_run(writes: _Writes) -> Column:
    stride, extent = writes.strides[:, 0], writes.shape[:, 0]
    return (writes.shape[:, 1:] == 1).all(axis=1) & ((stride == 1) | (extent == 1))


def _problem(writes: _Writes, memory: _Writes) -> str | None:
    """Count how often each element of one destination is written; return what is wrong, if anything."""
    shape, strides = memory.shape[0], memory.strides[0]
    num_elements = int(shape.prod())
    if not num_elements and not len(writes):
        return None
    length = int(((shape - 1) * strides).sum()) + 1 if num_elements else 0
    last = writes.offset + ((writes.shape - 1) * writes.strides).sum(axis=1)
    outside = int(((writes.offset < 0) | (last >= length)).sum())
    if outside:
        return f"{outside} copies exceed its memory of {length} elements"
    grain = int(np.gcd.reduce(_grains(_Writes.join([writes, memory]))))
    counts, present = (_counts(rows, grain, -(-length // grain)) for rows in (writes, memory))
    missing = int(((counts == 0) & (present == 1)).sum()) * grain
    doubled = int(((counts > 1) & (present == 1)).sum()) * grain
    beside = int(((counts > 0) & (present == 0)).sum()) * grain
    if not missing and not doubled and not beside:
        return None
    return f"of {num_elements} elements {missing} are missing, {doubled} written more than once, {beside} outside it"


def _is_inner(writes: _Writes) -> Column:
    """Return the dim of contiguous elements, if there is one: the last of stride 1. bool [R, D]"""
    is_one = writes.strides == 1
    return is_one & (np.cumsum(is_one[:, ::-1], axis=1)[:, ::-1] == 1)


def _grains(writes: _Writes) -> Column:
    """Return the largest size of aligned stretches of which each write is made. int64 [R]"""
    is_inner = _is_inner(writes)
    run = np.where(is_inner, writes.shape, 1).prod(axis=1)
    steps = np.where(is_inner | (writes.shape == 1), 0, writes.strides)
    return np.gcd(np.gcd.reduce(steps, axis=1), np.gcd(run, writes.offset))


def _counts(writes: _Writes, grain: int, num_grains: int) -> Column:
    """Count how often each stretch of `grain` elements is written. int64 [num_grains]"""
    is_inner = _is_inner(writes)
    shape = np.where(is_inner, writes.shape // grain, writes.shape)
    steps = np.where(is_inner, 1, writes.strides // grain)
    row, rest = spread(shape.prod(axis=1))
    at = writes.offset[row] // grain
    for dim in reversed(range(shape.shape[1])):
        rest, step = np.divmod(rest, shape[row, dim])
        at += step * steps[row, dim]
    return np.bincount(at, minlength=num_grains)
