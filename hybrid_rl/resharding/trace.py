"""The trace of an engine's loader: the place in the engine of every element of the trainer's weights (tracer.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.layout import TensorSpec
from hybrid_rl.resharding.tables import Column, Copies, Table


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

    def fill(self, destinations: Sequence[Tensor]) -> None:
        """Write the constants. destinations: in the order of the trace."""
        for i in range(len(self.fills)):
            target = destinations[int(self.fills.destination[i])]
            first = target.storage_offset() + int(self.fills.offset[i])
            view = target.as_strided(self.fills.shape[i].tolist(), self.fills.strides[i].tolist(), first)
            view.fill_(float(self.fills.value[i]))

    def digest(self) -> str:
        """A short hash of everything in the trace."""
        found = hashlib.blake2b(self._head().encode(), digest_size=8)
        for table in (self.copies, self.fills):
            for item in fields(table):
                found.update(np.ascontiguousarray(getattr(table, item.name)).tobytes())
        return found.hexdigest()

    def save(self, path: Path) -> None:
        """Write the trace to an .npz file, compressed."""
        columns: dict[str, Any] = {"head": np.frombuffer(self._head().encode(), dtype=np.uint8)}
        for prefix, table in (("copies", self.copies), ("fills", self.fills)):
            for item in fields(table):
                column = getattr(table, item.name)
                # Neighbouring rows are similar, and differences of integers compress well.
                change = column if column.dtype == np.float64 else np.diff(column, axis=0, prepend=0)
                columns[f"{prefix}.{item.name}"] = np.ascontiguousarray(change.T)
        np.savez_compressed(path, **columns)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote. Raises HandoffError if the file is not a trace."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                columns = {name: stored[name] for name in stored.files}
            head = json.loads(columns["head"].tobytes().decode())
        except (OSError, ValueError, KeyError) as error:
            raise HandoffError(f"cannot read a trace from {path}: {error}") from error

        def table(kind: Any, prefix: str) -> Any:
            found = {item.name: columns[f"{prefix}.{item.name}"].T for item in fields(kind)}
            return kind(**{n: c if c.dtype == np.float64 else np.cumsum(c, axis=0) for n, c in found.items()})

        return cls(
            tuple(TensorSpec(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in head["sources"]),
            tuple(
                DestinationSpec(name, tuple(shape), tuple(strides), getattr(torch, dtype))
                for name, shape, strides, dtype in head["destinations"]
            ),
            table(Copies, "copies"),
            table(Fills, "fills"),
            head["untraced"],
            tuple(head["unused"]),
        )

    def _head(self) -> str:
        return json.dumps(
            {
                "sources": [(s.name, s.shape, str(s.dtype)[len("torch.") :]) for s in self.sources],
                "destinations": [
                    (d.name, d.shape, d.strides, str(d.dtype)[len("torch.") :]) for d in self.destinations
                ],
                "untraced": self.untraced,
                "unused": self.unused,
            }
        )
