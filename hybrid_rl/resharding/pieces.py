"""Pieces of a plan: overlaps of an engine's copies with the parts of ranks, merged and cut to the size of a bucket.

All functions work on whole columns, because there may be millions of overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Column, Copies, Pieces
from hybrid_rl.resharding.layout import SourceLayout


class Cells:
    """The cells of a layout's tensors as columns, to look up the cells that a box overlaps, and their holders."""

    def __init__(self, layout: SourceLayout) -> None:
        grids: dict[tuple[int, int], int] = {}  # tensors of equal layers share their cuts and owners
        firsts: dict[int, int] = {}
        owners: list[npt.NDArray[np.int32]] = []
        self.shape = np.ones((len(layout.tensors), MAX_DIMS), dtype=np.int64)
        self.grid = np.empty(len(layout.tensors), dtype=np.int64)
        cuts: list[list[tuple[int, ...]]] = [[] for _ in range(MAX_DIMS)]
        first_owner: list[int] = []
        num_copies: list[int] = []
        for index, tensor in enumerate(layout.tensors):
            self.shape[index, : tensor.check_dims()] = tensor.spec.shape
            key = (id(tensor.cuts), id(tensor.owners))
            self.grid[index] = grids.setdefault(key, len(grids))
            if self.grid[index] < len(first_owner):
                continue
            if id(tensor.owners) not in firsts:
                firsts[id(tensor.owners)] = sum(map(len, owners))
                owners.append(tensor.owners.ravel())
            first_owner.append(firsts[id(tensor.owners)])
            num_copies.append(tensor.owners.shape[-1])
            for dim in range(MAX_DIMS):
                cuts[dim].append(tensor.cuts[dim] if dim < len(tensor.cuts) else (0, 1))
        self.owners = np.concatenate(owners) if owners else np.empty(0, dtype=np.int32)
        self.first_owner = np.array(first_owner, dtype=np.int64)
        self.num_copies = np.array(num_copies, dtype=np.int64)
        self.num_cells = np.array([[len(c) - 1 for c in column] for column in cuts], dtype=np.int64).T
        # The cuts of all grids in one increasing column per dim: each grid's are shifted by its number times the span.
        self._span = int(self.shape.max(initial=0)) + 1
        self._first_cut = [_starts(np.array([len(c) for c in column], dtype=np.int64)) for column in cuts]
        self._cuts = [
            np.concatenate([np.empty(0, np.int64), *(np.array(c) + i * self._span for i, c in enumerate(column))])
            for column in cuts
        ]

    def meeting(self, dim: int, grid: Column, low: Column, high: Column) -> tuple[Column, Column]:
        """Return for boxes in tensors of these grids the first cell of a dim that they overlap, and how many."""
        cuts, shift = self._cuts[dim], grid * self._span
        first = np.searchsorted(cuts, low + shift, side="right") - 1
        return first - self._first_cut[dim][grid], np.searchsorted(cuts, high + shift, side="left") - first

    def bounds(self, dim: int, grid: Column, cell: Column) -> tuple[Column, Column]:
        """Return begin and end of cells of a dim."""
        at, shift = self._first_cut[dim][grid] + cell, grid * self._span
        return self._cuts[dim][at] - shift, self._cuts[dim][at + 1] - shift


def overlaps(copies: Copies, layout: SourceLayout, item_bytes: Column, rank: int) -> Pieces:
    """Return one piece for each cell that each copy overlaps, to be read from a rank that holds the cell.

    copies.source: index in layout.tensors. item_bytes [copies]: size of an element at the destination. The rank itself
    is preferred, then ranks of its host; among equals bytes are balanced, and different ranks begin at different ones.
    Raises HandoffError for a box outside its tensor.
    """
    cells = Cells(layout)
    shape = cells.shape[copies.source]
    outside = np.flatnonzero(((copies.low < 0) | (copies.high > shape)).any(axis=1))
    if len(outside):
        row = outside[0]
        spec = layout.tensors[copies.source[row]].spec
        raise HandoffError(
            f"a copy takes {copies.low[row].tolist()} to {copies.high[row].tolist()} of {spec.name}, whose shape is "
            f"{list(spec.shape)}: engine and trainer differ in the model; build both from one config"
        )
    copies_kept = np.flatnonzero((copies.high > copies.low).all(axis=1))
    copies, item_bytes = copies.select(copies_kept), item_bytes[copies_kept]
    grid = cells.grid[copies.source]
    ranges = [cells.meeting(dim, grid, copies.low[:, dim], copies.high[:, dim]) for dim in range(MAX_DIMS)]
    row, rest = spread(np.prod([count for _, count in ranges], axis=0))
    copies, grid = copies.select(row), grid[row]
    low, high, extent, coordinate = (np.empty((len(row), MAX_DIMS), dtype=np.int64) for _ in range(4))
    begin = np.empty_like(low)
    for dim in reversed(range(MAX_DIMS)):
        first, count = (column[row] for column in ranges[dim])
        rest, step = np.divmod(rest, count)
        coordinate[:, dim] = first + step
        begin[:, dim], end = cells.bounds(dim, grid, coordinate[:, dim])
        extent[:, dim] = end - begin[:, dim]
        low[:, dim] = np.maximum(copies.low[:, dim], begin[:, dim])
        high[:, dim] = np.minimum(copies.high[:, dim], end)
    shape = high - low
    own, whole = contiguous_strides(extent), contiguous_strides(cells.shape[copies.source])
    holders = (
        cells.first_owner[grid]
        + (coordinate * contiguous_strides(cells.num_cells[grid])).sum(axis=1) * (cells.num_copies[grid])
    )
    return Pieces(
        source=copies.source,
        source_rank=_choose(
            cells.owners, holders, cells.num_copies[grid], shape.prod(axis=1) * item_bytes[row], rank, layout.hosts
        ),
        source_offset=((low - begin) * own).sum(axis=1),
        source_strides=own,
        destination=copies.destination,
        destination_offset=copies.offset + ((low - copies.low) * copies.strides).sum(axis=1),
        destination_strides=copies.strides,
        shape=shape,
        global_offset=(low * whole).sum(axis=1),
        global_strides=whole,
    )


def simplified(pieces: Pieces) -> Pieces:
    """Merge the same elements into fewer dims and fewer pieces: ranges that are contiguous on both sides, and in the
    global tensor that keys the content hash, become one."""
    return _coalesced(_merged(_squeezed(pieces)))


def divided(pieces: Pieces, item_bytes: Column, max_bytes: int) -> tuple[Pieces, Column]:
    """Cut pieces by rows to at most max_bytes each. Returns them, and their rows of item_bytes.

    item_bytes [pieces]: at most max_bytes each. Dims of extent 1 must come last.
    """
    while True:
        size = pieces.num_elements * item_bytes
        if not (size > max_bytes).any():
            return pieces, item_bytes
        extent = pieces.shape[:, 0]
        rows = np.where(size > max_bytes, np.maximum(1, max_bytes // (size // extent)), extent)
        row, part = spread(-(-extent // rows))
        begin = part * rows[row]
        pieces, item_bytes, shape = pieces.select(row), item_bytes[row], pieces.shape[row]
        shape[:, 0] = np.minimum(rows[row], shape[:, 0] - begin)
        pieces = replace(
            pieces,
            shape=shape,
            source_offset=pieces.source_offset + begin * pieces.source_strides[:, 0],
            destination_offset=pieces.destination_offset + begin * pieces.destination_strides[:, 0],
            global_offset=pieces.global_offset + begin * pieces.global_strides[:, 0],
        )
        pieces = _squeezed(pieces)


def spread(counts: Column) -> tuple[Column, Column]:
    """Expand each i to counts[i] rows: return the i of each row, and its number among the rows of i."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(_starts(counts), counts)


def join_dims(shape: Column, strides: Sequence[Column]) -> None:
    """Merge, in place, neighbouring dims that are contiguous by all of these strides. Dims of extent 1 come last."""
    for dim in reversed(range(shape.shape[1] - 1)):
        joins = shape[:, dim + 1] > 1
        for column in strides:
            joins &= column[:, dim] == column[:, dim + 1] * shape[:, dim + 1]
        rows = np.flatnonzero(joins)
        shape[rows, dim + 1] *= shape[rows, dim]
        for column, fill in ((shape, 1), *((column, 0) for column in strides)):
            column[rows, dim:-1] = column[rows, dim + 1 :]
            column[rows, -1] = fill


def contiguous_strides(shape: Column) -> Column:
    """Return the strides of contiguous tensors of these shapes; both int64 [tensors, dims]."""
    strides = np.ones_like(shape)
    strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return strides


def _starts(counts: Column) -> Column:
    return np.cumsum(counts) - counts


def _choose(
    owners: npt.NDArray[np.int32], first: Column, counts: Column, num_bytes: Column, rank: int, hosts: Sequence[str]
) -> Column:
    """Choose the rank that each piece is read from. Its candidates are owners[first : first + counts]."""
    numbers = {name: number for number, name in enumerate(hosts)}
    host = np.array([numbers[name] for name in hosts], dtype=np.int64)
    chosen = np.empty(len(first), dtype=np.int64)
    for count in np.unique(counts):
        rows = np.flatnonzero(counts == count)
        candidates = owners[first[rows, None] + np.arange(count)]
        allowed = candidates == rank
        near = host[candidates] == host[rank]
        allowed |= near & ~allowed.any(axis=1, keepdims=True)
        allowed |= ~allowed.any(axis=1, keepdims=True)
        num_allowed = allowed.sum(axis=1)
        turn = (_slots(first[rows], num_bytes[rows], num_allowed) + rank) % num_allowed
        position = (np.cumsum(allowed, axis=1) == turn[:, None] + 1).argmax(axis=1)
        chosen[rows] = candidates[np.arange(len(rows)), position]
    return chosen


def _slots(group: Column, num_bytes: Column, num_slots: Column) -> Column:
    """Assign the pieces of a group to num_slots ranges of equal bytes; different groups begin at different ranges."""
    order = np.argsort(group, kind="stable")
    begins = np.diff(group[order], prepend=-1) != 0
    number, size = np.cumsum(begins) - 1, num_bytes[order]
    total = np.add.reduceat(size, np.flatnonzero(begins)) if len(size) else size
    middle = np.cumsum(size) - size - (np.cumsum(total) - total)[number] + size // 2
    slots = np.empty_like(group)
    slots[order] = middle * num_slots[order] // np.maximum(total[number], 1) + number
    return slots


def _squeezed(pieces: Pieces) -> Pieces:
    """Move extents of 1 to the end, with strides of 0."""
    order = np.argsort(pieces.shape == 1, axis=1, kind="stable")
    shape = np.take_along_axis(pieces.shape, order, axis=1)

    def moved(strides: Column) -> Column:
        return np.where(shape == 1, 0, np.take_along_axis(strides, order, axis=1))

    return replace(
        pieces,
        shape=shape,
        source_strides=moved(pieces.source_strides),
        destination_strides=moved(pieces.destination_strides),
        global_strides=moved(pieces.global_strides),
    )


def _merged(pieces: Pieces) -> Pieces:
    """Merge neighbouring dims that are contiguous everywhere. Dims of extent 1 must come last."""
    shape = pieces.shape.copy()
    strides = [pieces.source_strides.copy(), pieces.destination_strides.copy(), pieces.global_strides.copy()]
    join_dims(shape, strides)
    source, destination, whole = strides
    return replace(pieces, shape=shape, source_strides=source, destination_strides=destination, global_strides=whole)


def _coalesced(pieces: Pieces) -> Pieces:
    """Join pieces that begin where another one ends. Sorted by source."""
    if not len(pieces):
        return pieces
    pieces = pieces.select(np.lexsort((pieces.source_offset, pieces.destination, pieces.source_rank, pieces.source)))
    a, b = pieces.select(slice(None, -1)), pieces.select(slice(1, None))
    joins = (a.source == b.source) & (a.source_rank == b.source_rank) & (a.destination == b.destination)
    joins &= (a.shape[:, 1:] == b.shape[:, 1:]).all(axis=1)
    for side in ("source", "destination", "global"):
        strides, offset = getattr(a, f"{side}_strides"), getattr(a, f"{side}_offset")
        joins &= (strides == getattr(b, f"{side}_strides")).all(axis=1)
        joins &= offset + a.shape[:, 0] * strides[:, 0] == getattr(b, f"{side}_offset")
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    shape = pieces.shape[firsts]
    shape[:, 0] = np.add.reduceat(pieces.shape[:, 0], firsts)
    return replace(pieces.select(firsts), shape=shape)
