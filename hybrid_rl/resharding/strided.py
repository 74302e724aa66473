"""Strided views, described by axis-aligned boxes of the tensors that they view."""

from __future__ import annotations

import math
from collections.abc import Sequence

Axis = tuple[int, int, int]  # extent, stride in the source, stride in the destination; in elements
SourceBox = tuple[list[int], list[int], int, list[int]]  # low, high, offset in the destination, its strides

MAX_BOXES = 1 << 16


def boxes(source_offset: int, offset: int, axes: Sequence[Axis], shape: Sequence[int]) -> list[SourceBox] | None:
    """Describe a copy from a view of a contiguous tensor of this shape as copies of boxes of that tensor.

    source_offset: of the view's first element in the source; offset: of its destination. The strides of a box are the
    steps in the destination along each dim of the source. Returns None if that takes more than MAX_BOXES.
    """
    steps = _contiguous_strides(shape)
    source_boxes: list[SourceBox] = []
    pending = [(source_offset, offset, [axis for axis in axes if axis[0] != 1])]
    while pending:
        if len(source_boxes) + len(pending) > MAX_BOXES:
            return None
        at, to, rest = pending.pop()
        low, remains = [], at
        for step in steps:
            low.append(remains // step if step else 0)
            remains -= low[-1] * step
        taken = _as_box(low, to, rest, shape, steps)
        if isinstance(taken, tuple):
            source_boxes.append(taken)
            continue
        # An axis that does not run along one dim is cut: into stretches that do if possible, otherwise step by step.
        extent, stride, way = rest.pop(taken)
        dim = _dim_of(stride, shape, steps)
        if dim is not None and steps[dim] == stride and low[dim] + extent > shape[dim]:
            room = shape[dim] - low[dim]
            runs = extent // room if low[dim] == 0 else 1
            head = [(runs, stride * room, way * room), (room, stride, way)]
            tail = (extent - runs * room, stride, way)
            pending.append((at, to, rest + [axis for axis in head if axis[0] > 1]))
            if tail[0]:
                moved = at + runs * room * stride, to + runs * room * way
                pending.append((*moved, rest + [tail] * (tail[0] > 1)))
        else:
            if extent > MAX_BOXES:
                return None
            pending.extend((at + i * stride, to + i * way, list(rest)) for i in reversed(range(extent)))
    return source_boxes


def without_overlaps(
    writes: Sequence[tuple[int, Sequence[Axis]]], shape: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int, int, list[Axis]]] | None:
    """Return writes to one contiguous tensor without overlaps: later ones hide earlier ones.

    writes: (offset in the tensor, axes with strides in the tensor last). Returns (index of the write, offset, shift of
    its source offset, axes); None if a write is not made of boxes of the tensor.
    """
    if list(strides) != _contiguous_strides(shape):
        return None
    kept: list[tuple[int, int, int, list[Axis]]] = []
    taken: list[tuple[list[int], list[int]]] = []
    for index in reversed(range(len(writes))):
        offset, axes = writes[index]
        # Relative to the tensor: its boxes, with the step in the write's source along each of its dims.
        write_boxes = boxes(offset, 0, [(extent, to, way) for extent, way, to in axes], shape)
        if write_boxes is None:
            return None
        for low, high, moved, ways in write_boxes:
            for piece_low, piece_high in _subtract(low, high, taken):
                extents = [b - a for a, b in zip(piece_low, piece_high, strict=True)]
                away = moved + sum((p - q) * way for p, q, way in zip(piece_low, low, ways, strict=True))
                at = sum(p * stride for p, stride in zip(piece_low, strides, strict=True))
                kept.append((index, at, away, list(zip(extents, ways, strides, strict=True))))
        taken.extend((low, high) for low, high, _, _ in write_boxes)
    return kept[::-1]


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _dim_of(stride: int, shape: Sequence[int], steps: Sequence[int]) -> int | None:
    """Return the dim, among those with several elements, along which a stride makes whole steps inside the dim."""
    for dim, step in enumerate(steps):
        if shape[dim] > 1 and step <= stride:
            return dim
    return None


def _as_box(
    low: list[int], offset: int, axes: Sequence[Axis], shape: Sequence[int], steps: Sequence[int]
) -> SourceBox | int:
    """Return the box that the axes span from its lowest element; or the position of an axis that does not fit."""
    extents, ways = [1] * len(shape), [0] * len(shape)
    # Finest first: an axis of larger steps continues a finer one if both sides agree.
    for position in sorted(range(len(axes)), key=lambda p: axes[p][1]):
        extent, stride, way = axes[position]
        dim = _dim_of(stride, shape, steps)
        if dim is None:
            return position
        run, step = extents[dim], steps[dim]
        if run == 1 and stride == step:
            new = extent
        elif run > 1 and stride == step * run and way == ways[dim] * run:
            new = extent * run
        else:
            return position
        if low[dim] + new > shape[dim]:
            return position
        extents[dim] = new
        ways[dim] = ways[dim] if run > 1 else way
    return low, [a + b for a, b in zip(low, extents, strict=True)], offset, ways


def _subtract(
    low: Sequence[int], high: Sequence[int], taken: Sequence[tuple[list[int], list[int]]]
) -> list[tuple[list[int], list[int]]]:
    """Return a box minus other boxes, as boxes."""
    left = [(list(low), list(high))]
    for other_low, other_high in taken:
        remaining: list[tuple[list[int], list[int]]] = []
        for a, b in left:
            if any(x >= q or y <= p for x, y, p, q in zip(a, b, other_low, other_high, strict=True)):
                remaining.append((a, b))
                continue
            a, b = list(a), list(b)
            for dim in range(len(a)):
                if a[dim] < other_low[dim]:
                    remaining.append((list(a), [*b[:dim], other_low[dim], *b[dim + 1 :]]))
                    a[dim] = other_low[dim]
                if b[dim] > other_high[dim]:
                    remaining.append(([*a[:dim], other_high[dim], *a[dim + 1 :]], list(b)))
                    b[dim] = other_high[dim]
        left = remaining
    return left
