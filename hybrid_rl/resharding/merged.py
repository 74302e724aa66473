"""Adapters merged into an engine's weights, and into the parts that a proof compares them with.

The plan has just written the base into the engine's tensors when they are merged. No change is ever taken out again:
the next handoff writes the base first, so errors of rounding cannot add up.

The compiled operator `low_rank_merge` (csrc) does the work on CPUs and on CUDA; `LowRank.merged` is its oracle, to the
bit, and replaces it if it was not built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_rl import native
from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.execute import CASTS, cast
from hybrid_rl.resharding.handoff.base import Source
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.tensors.boxes import Box
from hybrid_rl.weights.low_rank import LowRank

Changes = Mapping[str, LowRank]
_OPERATOR = "low_rank_merge"


def check_changes(changes: Changes, layout: SourceLayout) -> None:
    """Raise HandoffError if a change is not one of a tensor of the layout."""
    shapes = {sharded.spec.name: sharded.spec.shape for sharded in layout.tensors}
    for name, change in changes.items():
        if shapes.get(name) != change.shape:
            found = f"has {list(shapes[name])}" if name in shapes else "hands over no such tensor"
            raise HandoffError(
                f"an adapter changes {name} {list(change.shape)}, but the trainer {found}; a tied tensor is adapted "
                f"under its first name"
            )


@torch.no_grad()
def merge(trace: Trace, destinations: Sequence[Tensor], changes: Changes) -> int:
    """Change an engine's tensors, which hold the base, and return the bytes that were written again.

    destinations: in the order of the trace. What the trace leaves out (derived layers) is not touched. Raises
    HandoffError, before anything is written, if the engine keeps a changed tensor in a dtype narrower than the
    trainer computes in: it would be rounded twice.
    """
    adapted = np.array([spec.name in changes for spec in trace.sources], dtype=bool)
    copies = trace.copies.select(np.flatnonzero(adapted[trace.copies.source]))
    names = [trace.sources[i].name for i in copies.source.tolist()]
    for name, number in {*zip(names, copies.destination.tolist(), strict=True)}:
        held, computed = destinations[number].dtype, changes[name].dtype
        if torch.promote_types(held, computed) != held:
            raise HandoffError(
                f"the engine holds {trace.destinations[number].name} in {held}, but the trainer computes {name} in "
                f"{computed}; give the engine the trainer's dtype"
            )
    ready: dict[tuple[str, torch.device], LowRank] = {}
    boxes: list[_Merge] = []
    for i, name in enumerate(names):
        target = destinations[int(copies.destination[i])]
        key = name, target.device
        if key not in ready:
            ready[key] = changes[name].ready(target.device)
        dims = len(ready[key].shape)
        box = tuple(map(slice, copies.low[i, :dims].tolist(), copies.high[i, :dims].tolist()))
        shape = [side.stop - side.start for side in box]
        first = target.storage_offset() + int(copies.offset[i])
        view = target.as_strided(shape, copies.strides[i, :dims].tolist(), first)
        boxes.append(_Merge(ready[key], view, view, box))
    _carry_out(boxes)
    return sum(box.target.nbytes for box in boxes)


@torch.no_grad()
def merged_part(change: LowRank, part: Tensor, box: Box, dtype: torch.dtype) -> Tensor:
    """Return the changed values of a rank's part of a tensor, contiguous, in a dtype. box: of the part."""
    base = part.reshape([side.stop - side.start for side in box])
    target = torch.empty_like(base, dtype=dtype, memory_format=torch.contiguous_format)
    _carry_out([_Merge(change.ready(base.device), base, target, box)])
    return target


def full_merged(source: Source, name: str) -> Tensor:
    """Return a whole tensor of a source with its change, rounded to the dtype that the trainer computes in. Collective
    if the source sends messages."""
    full = source.full(name)
    change = source.changes.get(name)
    if change is None:
        return full
    return merged_part(change, full, tuple(slice(0, extent) for extent in full.shape), change.dtype)


# ---------------------------------------------------------------------------------------------------------- execution


@dataclass(frozen=True)
class _Merge:
    """A box of a changed tensor to be written. change: made ready for the device; base, target: views of the box, which
    may be the same memory."""

    change: LowRank
    base: Tensor
    target: Tensor
    box: Box

    @property
    def is_compiled(self) -> bool:
        """Whether the operator takes it: it does not round the base to a narrower dtype first."""
        base, computed = self.base.dtype, self.change.dtype
        return {base, self.target.dtype} <= CASTS.keys() and torch.promote_types(base, computed) == computed

    def row(self) -> list[int]:
        """Return the row of the operator's table, whose columns csrc/low_rank.h names."""
        change, first = self.change, [side.start for side in self.box]
        a, b = (factor if factor.dim() == 3 else factor[None] for factor in (change.a, change.b))
        # Addresses, and strides along experts, this dim of the tensor, and k.
        out = b.data_ptr(), [b.stride(0), b.stride(1), b.stride(2)]
        into = a.data_ptr(), [a.stride(0), a.stride(2), a.stride(1)]
        sides = [into, out] if change.is_transposed else [out, into]
        shape, base, target = (
            [1] * (3 - len(values)) + [*values]
            for values in (self.target.shape, self.base.stride(), self.target.stride())
        )
        first = [0] * (3 - len(first)) + first
        factors = [0, 0, 0]
        if change.row_factor is not None:
            at = int(change.is_transposed)
            factors = [change.row_factor.data_ptr() + 4 * first[1 + at], 1 - at, at]
        if target[2] != 1 and target[1] == 1:  # the operator walks along columns
            for dims in (shape, base, target, first):
                dims[1], dims[2] = dims[2], dims[1]
            sides.reverse()
            factors[1], factors[2] = factors[2], factors[1]
        row = [self.base.data_ptr(), self.target.data_ptr(), CASTS[self.base.dtype], CASTS[self.target.dtype]]
        row += [*shape, *base, *target]
        for side, (address, strides) in enumerate(sides):
            row += [address + 4 * (first[0] * strides[0] + first[1 + side] * strides[1]), *strides]
        return [*row, change.rank, *factors]


def _carry_out(boxes: Sequence[_Merge]) -> None:
    """Write boxes: those of a device in one call of the operator, as far as it takes them."""
    for device in {box.target.device for box in boxes}:
        operator = native.operator(_OPERATOR, device.type)
        rows = []
        for box in boxes:
            if box.target.device != device or not box.target.numel():
                continue
            if operator is not None and box.is_compiled:
                rows.append(box.row())
            else:
                box.target.copy_(cast(box.change.merged(box.base, box.box), box.target.dtype))
        if operator is not None and rows:
            operator(torch.tensor(rows, dtype=torch.int64), torch.empty(0, device=device))
