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

from hybrid_rl.compat import native
from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import Column, Copies
from hybrid_rl.resharding.execute import CASTS, cast, view_of
from hybrid_rl.resharding.handoff.base import Source
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.weights.boxes import Box
from hybrid_rl.weights.low_rank import LowRank

Changes = Mapping[str, LowRank]
_OPERATOR = "low_rank_merge"


def check_changes(changes: Changes, layout: SourceLayout) -> None:
    """Raise HandoffError if a change is not one of a tensor of the layout."""
    shapes = {sharded.spec.name: sharded.spec.shape for sharded in layout.tensors}
    for name, change in changes.items():
        if shapes.get(name) != change.shape:
            predicate = f"has {list(shapes[name])}" if name in shapes else "hands over no such tensor"
            raise HandoffError(
                f"an adapter changes {name} {list(change.shape)}, but the trainer {predicate}; a tied tensor is "
                f"adapted under its first name"
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
    merges = []
    ready: dict[tuple[str, torch.device], LowRank] = {}
    pairs, of_pair = np.unique(np.stack([copies.source, copies.destination], axis=1), axis=0, return_inverse=True)
    for number, (source, destination) in enumerate(pairs.tolist()):
        name, target = trace.sources[source].name, destinations[destination]
        key = name, target.device
        if key not in ready:
            ready[key] = changes[name].ready(target.device)
        merges.append(Merge.in_place(ready[key], target, copies.select(np.flatnonzero(of_pair.ravel() == number))))
    carry_out(merges)
    return sum(each.num_elements * each.target.itemsize for each in merges)


@torch.no_grad()
def merged_part(change: LowRank, part: Tensor, box: Box, dtype: torch.dtype) -> Tensor:
    """Return the changed values of a rank's part of a tensor, contiguous, in a dtype. box: of the part."""
    base = part.reshape([side.stop - side.start for side in box])
    target = torch.empty_like(base, dtype=dtype, memory_format=torch.contiguous_format)
    carry_out([Merge.of(change.ready(base.device), base, target, box)])
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
class Merge:
    """Boxes of a changed tensor to be written from those of the unchanged one.

    change: made ready for the device. base, target: tensors whose memory is read and written, perhaps the same.
    low, high [B, dims]: the boxes in the changed tensor. base_offset, target_offset [B]: of the element `low`, from a
    tensor's first element; base_strides, target_strides [B, dims]: steps in its memory along the dims of a box.
    """

    change: LowRank
    base: Tensor
    target: Tensor
    low: Column
    high: Column
    base_offset: Column
    base_strides: Column
    target_offset: Column
    target_strides: Column

    @classmethod
    def of(cls, change: LowRank, base: Tensor, target: Tensor, box: Box) -> Merge:
        """Merge one box. base, target: views of the box."""
        bounds = np.array([[side.start for side in box], [side.stop for side in box]], dtype=np.int64)
        strides = (np.array([view.stride()], dtype=np.int64) for view in (base, target))
        nothing = np.zeros(1, dtype=np.int64)
        return cls(change, base, target, bounds[:1], bounds[1:], nothing, next(strides), nothing, next(strides))

    @classmethod
    def in_place(cls, change: LowRank, target: Tensor, copies: Copies) -> Merge:
        """Merge what the copies of a loader have written into a tensor."""
        dims = len(change.shape)
        place = copies.offset, copies.strides[:, :dims]
        return cls(change, target, target, copies.low[:, :dims], copies.high[:, :dims], *place, *place)

    @property
    def num_elements(self) -> int:
        """Elements of all boxes."""
        return int((self.high - self.low).prod(axis=1).sum())

    @property
    def is_compiled(self) -> bool:
        """Whether the operator takes it: it does not round the base to a narrower dtype first."""
        base, computed = self.base.dtype, self.change.dtype
        return {base, self.target.dtype} <= CASTS.keys() and torch.promote_types(base, computed) == computed

    def table(self) -> Column:
        """Return the operator's table, int64 [B, columns], which csrc/low_rank.h names."""
        change, count = self.change, len(self.low)
        lead = ((0, 0), (3 - len(change.shape), 0))  # without experts, one
        first, shape = np.pad(self.low, lead), np.pad(self.high - self.low, lead, constant_values=1)
        base, target = np.pad(self.base_strides, lead), np.pad(self.target_strides, lead)
        a, b = (factor if factor.dim() == 3 else factor[None] for factor in (change.a, change.b))
        # Of each side its address, and its steps along experts, its dim of the tensor, and k.
        of_a = [a.data_ptr(), a.stride(0), a.stride(2), a.stride(1)]
        of_b = [b.data_ptr(), b.stride(0), b.stride(1), b.stride(2)]
        sides = np.tile(np.array([of_a, of_b] if change.is_transposed else [of_b, of_a]), (count, 1, 1))
        at = int(change.is_transposed)
        factors = np.zeros((count, 3), dtype=np.int64)
        if change.row_factor is not None:
            factors[:] = change.row_factor.data_ptr(), 1 - at, at
            factors[:, 0] += 4 * first[:, 1 + at]
        sides[:, :, 0] += 4 * (first[:, :1] * sides[:, :, 1] + first[:, 1:] * sides[:, :, 2])
        # The operator walks along columns.
        turned = (target[:, 2] != 1) & (target[:, 1] == 1)
        for columns in (shape, base, target):
            columns[turned, 1:] = columns[turned, :0:-1]
        sides[turned] = sides[turned, ::-1]
        factors[turned, 1:] = factors[turned, :0:-1]
        addresses = (
            tensor.data_ptr() + offset * tensor.itemsize
            for tensor, offset in ((self.base, self.base_offset), (self.target, self.target_offset))
        )
        constants = np.array([CASTS[self.base.dtype], CASTS[self.target.dtype], change.rank])
        types, rank = np.split(np.tile(constants, (count, 1)), [2], axis=1)
        places = np.stack([*addresses], axis=1)
        return np.concatenate([places, types, shape, base, target, sides.reshape(count, 8), rank, factors], axis=1)

    def by_oracle(self) -> None:
        """Write the boxes without the operator."""
        for i, (low, high) in enumerate(zip(self.low.tolist(), self.high.tolist(), strict=True)):
            shape = [end - begin for begin, end in zip(low, high, strict=True)]
            base = view_of(self.base, shape, self.base_strides[i], self.base_offset[i])
            values = cast(self.change.merged(base, tuple(map(slice, low, high))), self.target.dtype)
            view_of(self.target, shape, self.target_strides[i], self.target_offset[i]).copy_(values)


def carry_out(merges: Sequence[Merge]) -> None:
    """Write all boxes: those of a device in one call of the operator, as far as it takes them."""
    for device in dict.fromkeys(merge.target.device for merge in merges):
        operator = native.operator(_OPERATOR, device.type)
        tables = []
        for merge in merges:
            if merge.target.device != device:
                continue
            if operator is not None and merge.is_compiled:
                tables.append(merge.table())
            else:
                merge.by_oracle()
        if operator is not None and tables:
            operator(torch.from_numpy(np.concatenate(tables)), torch.empty(0, device=device))
