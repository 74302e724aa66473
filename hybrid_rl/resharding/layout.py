"""Layouts of weights: names, shapes and dtypes, and the rank of every part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hybrid_rl.compat.torch import StridedShard, split_over_axis
from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Column

Cuts = tuple[tuple[int, ...], ...]
PLAIN: tuple[Placement, ...] = (Replicate(),)  # on an axis of all ranks that hold the tensor


@dataclass(frozen=True)
class TensorSpec:
    """A global parameter or buffer under its checkpoint name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ShardedTensor:
    """A global tensor cut into a grid of cells.

    cuts: for each dim the boundaries of the cells, increasing from 0 to the extent; empty cells do not exist.
    owners: int32 [cells of dim 0, cells of dim 1, ..., copies]: the ranks that hold each cell, as one contiguous
    tensor. A rank holds at most one cell.
    """

    spec: TensorSpec
    cuts: Cuts
    owners: npt.NDArray[np.int32]

    @classmethod
    def of(cls, spec: TensorSpec, mesh: npt.NDArray[np.int32], placements: Sequence[Placement]) -> ShardedTensor:
        """Place a tensor on a mesh of ranks, one placement per axis, as a DTensor does: torch.chunk semantics, and
        FSDP2's interleaved chunks over tensor parallelism.

        Raises HandoffError if a rank's part is not a box, or is only a summand.
        """
        try:
            cuts, owners = _grid(spec.shape, mesh.shape, mesh.astype(np.int32).tobytes(), tuple(placements))
        except HandoffError as error:
            raise HandoffError(f"{spec.name} {list(spec.shape)}: {error}") from None
        return cls(spec, cuts, owners)

    def check_dims(self) -> int:
        """Return the number of dims. Raises HandoffError if it is more than tables of boxes have room for."""
        if len(self.cuts) > MAX_DIMS:
            raise HandoffError(
                f"{self.spec.name} has {len(self.cuts)} dims; at most {MAX_DIMS} can be resharded: reshape it"
            )
        return len(self.cuts)


@dataclass(frozen=True)
class SourceLayout:
    """The ranks that hold the trainer's weights.

    tensors: in a fixed order, the same on all ranks.
    hosts: the host of each rank; ranks of one host can read each other's memory."""

    tensors: tuple[ShardedTensor, ...]
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, named: Mapping[str, Tensor], hosts: Sequence[str]) -> SourceLayout:
        """Make the layout of tensors, sharded (DTensor) or plain, ordered by name, without communication. All ranks
        hold the plain ones, as FSDP2 leaves buffers.

        Raises HandoffError for a tensor whose part on some rank is not a box, or is only a summand.
        """
        everybody = np.arange(len(hosts), dtype=np.int32)
        tensors = []
        for name, tensor in sorted(named.items()):
            mesh, placements = everybody, PLAIN
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh.mesh.cpu().numpy(), tensor.placements
            spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
            tensors.append(ShardedTensor.of(spec, mesh, placements))
        return cls(tuple(tensors), tuple(hosts))

    def numbers_of(self, specs: Sequence[TensorSpec], used: Column) -> Column:
        """Return the number in this layout of each tensor that an engine uses. used: indices in `specs`.

        Raises HandoffError if the layout lacks one of them, or has it in another shape.
        """
        known = {tensor.spec.name: (number, tensor.spec.shape) for number, tensor in enumerate(self.tensors)}
        numbers = np.full(len(specs), -1, dtype=np.int64)
        for index in np.unique(used).tolist():
            spec = specs[index]
            numbers[index], shape = known.get(spec.name, (-1, None))
            if shape != spec.shape:
                raise HandoffError(
                    f"the engine takes {spec.name} {list(spec.shape)}, the trainer "
                    f"{'does not have it' if shape is None else f'has {list(shape)}'}; build both from one config"
                )
        return numbers[used]

    def parts(self, rank: int) -> tuple[Column, Column]:
        """Return the box of every tensor that a rank holds: low and high, int64 [tensors, MAX_DIMS].

        Dims that a tensor does not have run from 0 to 1. If a rank holds nothing, low and high are 0. Raises
        HandoffError for a tensor of more dims.
        """
        low, high = (np.zeros((len(self.tensors), MAX_DIMS), dtype=np.int64) for _ in range(2))
        cells: dict[int, list[int] | None] = {}  # tensors share the arrays of owners
        for index, tensor in enumerate(self.tensors):
            key = id(tensor.owners)
            if key not in cells:
                at = np.argwhere(tensor.owners == rank)
                cells[key] = at[0].tolist() if len(at) else None
            cell = cells[key]
            if cell is not None:
                num_dims = tensor.check_dims()
                high[index] = 1
                low[index, :num_dims] = [cuts[i] for cuts, i in zip(tensor.cuts, cell, strict=False)]
                high[index, :num_dims] = [cuts[i + 1] for cuts, i in zip(tensor.cuts, cell, strict=False)]
        return low, high

    def digest(self) -> str:
        """Return a short hash: equal if names, shapes, dtypes, cells, owners and hosts are."""
        return self._digest

    @cached_property
    def _digest(self) -> str:  # cached, because every handoff needs it several times
        hasher = hashlib.blake2b(repr(self.hosts).encode(), digest_size=8)
        owners: dict[int, bytes] = {}
        for tensor in self.tensors:
            if id(tensor.owners) not in owners:
                owners[id(tensor.owners)] = hashlib.blake2b(tensor.owners.tobytes(), digest_size=8).digest()
            hasher.update(f"{tensor.spec} {tensor.cuts} {tensor.owners.shape}".encode())
            hasher.update(owners[id(tensor.owners)])
        return hasher.hexdigest()


@lru_cache(maxsize=4096)
def _grid(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], ranks: bytes, placements: tuple[Placement, ...]
) -> tuple[Cuts, npt.NDArray[np.int32]]:
    """Return cuts and owners of a tensor, made once for all tensors of one shape. ranks: int32 [mesh]."""
    axes: list[list[int]] = [[] for _ in shape]  # the mesh axes that cut each dim
    copies = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, StridedShard)):
            axes[placement.dim].append(axis)
        elif isinstance(placement, Replicate):
            copies.append(axis)
        else:
            raise HandoffError(f"placed as {placement}, so no rank holds its values; redistribute it")
    cuts, chosen = [], []
    for extent, group in zip(shape, axes, strict=True):
        cells = _cells(extent, [(placements[axis], mesh_shape[axis]) for axis in group])
        chosen.append([coordinate for _, _, coordinate in cells])
        cuts.append((0, *(end for _, end, _ in cells)))
    # Ranks by the coordinates that cut dim 0, dim 1, ..., then by those of copies.
    order = [axis for group in axes for axis in group] + copies
    counts = [math.prod(mesh_shape[axis] for axis in group) for group in axes]
    owners = np.frombuffer(ranks, dtype=np.int32).reshape(mesh_shape).transpose(order).reshape(*counts, -1)
    for dim, coordinates in enumerate(chosen):
        owners = owners.take(np.array(coordinates, dtype=np.int64), axis=dim)
    return tuple(cuts), np.ascontiguousarray(owners)


def _cells(extent: int, axes: Sequence[tuple[Any, int]]) -> list[tuple[int, int, int]]:
    """Return the non-empty parts of a dim, in order: begin, end, and the coordinates on the axes that cut it, as one
    number. axes: placement and size, outermost first, as DTensor applies them."""
    dim = axes[0][0].dim if axes else 0
    parts = [torch.arange(extent).view(*[1] * dim, extent)]
    for placement, size in axes:
        # The chunks of torch.chunk, or the interleaved ones of FSDP2 over tensor parallelism; some may be empty.
        parts = [chunk for part in parts for chunk in split_over_axis(placement, part, size)]
    cells = []
    for row, part in enumerate(part.flatten() for part in parts):
        if not len(part):
            continue
        begin, end = int(part[0]), int(part[-1]) + 1
        if end - begin != len(part):
            raise HandoffError(
                f"a rank's part is not a box: {len(part)} of the indices {begin} to {end - 1} of a dim of {extent}; "
                f"choose mesh sizes that divide this dim"
            )
        cells.append((begin, end, row))
    return sorted(cells)
