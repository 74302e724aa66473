"""What weights there are: names, shapes and dtypes, and which rank holds which part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorSpec:
    """A global parameter or buffer under its checkpoint name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class WeightLayout:
    """The weights of a trainer or an engine, in a fixed order."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> WeightLayout:
        """The layout of named tensors, ordered by name."""
        return cls(
            tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in sorted(named, key=lambda pair: pair[0]))
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.tensors)

    def digest(self) -> str:
        """A short hash: two sides that agree on it walk the same tensors in the same order."""
        lines = "\n".join(f"{spec.name} {spec.shape} {spec.dtype}" for spec in self.tensors)
        return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a tied tensor once. Buffers belong to a handoff as much as parameters do."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    weights.update(module.named_buffers())
    return weights


@dataclass(frozen=True)
class ShardedTensor:
    """A global tensor cut into a grid of cells.

    cuts: for each dim where the cells begin and end, from 0 to the extent, rising; cells that would be empty are not
    there. owners: int32 [cells of dim 0, cells of dim 1, ..., copies]: the ranks that hold each cell, as one contiguous
    tensor. A rank holds at most one cell.
    """

    spec: TensorSpec
    cuts: tuple[tuple[int, ...], ...]
    owners: npt.NDArray[np.int32]


@dataclass(frozen=True)
class SourceLayout:
    """Who holds the trainer's weights. tensors: in a fixed order, the same on all ranks. hosts: where each rank lives,
    by rank; ranks of one host can read each other's memory."""

    tensors: tuple[ShardedTensor, ...]
    hosts: tuple[str, ...]
