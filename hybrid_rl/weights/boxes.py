"""Boxes of a global tensor: the part that a rank holds."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor

from hybrid_rl.compat.torch import local_shape_and_offset

Box = tuple[slice, ...]  # one slice per dim, with start and stop, without step


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part, without its gradient history; the tensor itself if it is not sharded."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the global tensor; collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> Box:
    """Return the box of this rank's part in the global tensor (torch.chunk semantics; it may be empty)."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, extent) for extent in tensor.shape)
    shape, offset = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + extent) for begin, extent in zip(offset, shape, strict=True))


def is_first_copy(tensor: Tensor, rank: int) -> bool:
    """Whether this rank represents its part among all ranks that hold the same one, so that it is counted once.

    For a tensor that is not sharded: whether this is rank 0.
    """
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )


def num_elements(box: Box) -> int:
    """Count the elements of a box; 1 for the box of a scalar."""
    return math.prod(part.stop - part.start for part in box)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes; None if there is none."""
    common = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return None if any(part.start >= part.stop for part in common) else common


def within(box: Box, outer: Box) -> Box:
    """Return a box in the coordinates of another one that contains it."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(box, outer, strict=True))
