"""The trace of an engine's loader: the place in the engine of every element of the trainer's weights (tracer.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import Column, Copies, Table
from hybrid_rl.resharding.layout import TensorSpec


@dataclass(frozen=True)
class DestinationSpec:
    """A tensor of the engine. strides: in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Fills(Table):
    """Constants that a loader sets, such as padding. destination, offset [R]; shape, strides [R, MAX_DIMS]: a box of
    the destination's memory, as in Copies; value [R], float64."""

    destination: Column
    offset: Column
    shape: Column
    strides: Column
    value: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """What one rank's engine takes from the global tensors.

    Copies and fills write each element of every destination exactly once, except for those in `untraced` (name ->
    reason), which they do not write at all. unused: names of sources that this rank's engine does not use.
    """

    sources: tuple[TensorSpec, ...]
    destinations: tuple[DestinationSpec, ...]
    copies: Copies
    fills: Fills
    untraced: dict[str, str]
    unused: tuple[str, ...]

    def without(self, reasons: Mapping[str, str]) -> Trace:
        """Return the trace with these destinations untraced, for the given reasons; indices do not change."""
        names = {spec.name for spec in self.destinations}
        if not reasons.keys() <= names:
            raise HandoffError(f"the trace has no destinations {sorted(reasons.keys() - names)}")
        dropped = [i for i, spec in enumerate(self.destinations) if spec.name in reasons]
        return replace(
            self,
            copies=self.copies.select(~np.isin(self.copies.destination, dropped)),
            fills=self.fills.select(~np.isin(self.fills.destination, dropped)),
            untraced={**self.untraced, **reasons},
        )

    def constants(self, destinations: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, float]]:
        """Yield of each constant the number of its destination, a view of its place there, and the value.

        destinations: in the order of the trace.
        """
        for i, number in enumerate(self.fills.destination.tolist()):
            target = destinations[number]
            first = target.storage_offset() + int(self.fills.offset[i])
            view = target.as_strided(self.fills.shape[i].tolist(), self.fills.strides[i].tolist(), first)
            yield number, view, float(self.fills.value[i])

    def fill(self, destinations: Sequence[Tensor]) -> None:
        """Write the constants. destinations: in the order of the trace."""
        for _, view, value in self.constants(destinations):
            view.fill_(value)
