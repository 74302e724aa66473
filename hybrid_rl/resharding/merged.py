"""Adapters merged into an engine's weights, and into the parts that a proof compares them with.

The plan has just written the base into the engine's tensors when they are merged. No change is ever taken out again:
the next handoff writes the base first, so errors of rounding cannot add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff.base import Source
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.trace import Trace
from hybrid_rl.tensors.boxes import Box
from hybrid_rl.weights.low_rank import LowRank

Changes = Mapping[str, LowRank]


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
    num_bytes = 0
    for i, name in enumerate(names):
        change, target = changes[name], destinations[int(copies.destination[i])]
        dims = len(change.shape)
        low, high = copies.low[i, :dims].tolist(), copies.high[i, :dims].tolist()
        first = target.storage_offset() + int(copies.offset[i])
        shape = [end - begin for begin, end in zip(low, high, strict=True)]
        view = target.as_strided(shape, copies.strides[i, :dims].tolist(), first)
        view.copy_(change.merged(view, tuple(map(slice, low, high))))
        num_bytes += view.nbytes
    return num_bytes


@torch.no_grad()
def merged_part(change: LowRank, part: Tensor, box: Box, dtype: torch.dtype) -> Tensor:
    """Return the changed values of a rank's part of a tensor, contiguous, in a dtype. box: of the part."""
    return change.merged(part.reshape([side.stop - side.start for side in box]), box).to(dtype)


def full_merged(source: Source, name: str) -> Tensor:
    """Return a whole tensor of a source with its change, rounded to the dtype that the trainer computes in. Collective
    if the source sends messages."""
    full = source.full(name)
    change = source.changes.get(name)
    if change is None:
        return full
    return merged_part(change, full, tuple(slice(0, extent) for extent in full.shape), change.dtype)
