"""A loader given as rows: the copies of an engine, carried out and recorded as a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.resharding.copy_tables import MAX_DIMS, Copies
from hybrid_rl.resharding.layout import TensorSpec
from hybrid_rl.resharding.trace import DestinationSpec, Fills, Trace


class Loading:
    """Global tensors and the engine's tensors, which are what the engine must hold in the end."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.destinations: list[Tensor] = []
        self._copies: list[list[int]] = []
        self._fills: list[tuple[int, Tensor, float]] = []

    def source(self, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        """A global tensor of which each element has a value of its own."""
        first = sum(tensor.numel() for tensor in self.sources) + 1
        size = int(np.prod(shape))
        self.sources.append(torch.arange(first, first + size, dtype=dtype).reshape(shape))
        return len(self.sources) - 1

    def destination(self, *shape: int, strides: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> int:
        """A tensor of the engine, of zeros."""
        tensor = torch.empty_strided(shape, strides or torch.empty(shape).stride(), dtype=dtype)
        # What lies between its elements must stay as it is.
        torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // dtype.itemsize,), (1,), 0).fill_(-1)
        self.destinations.append(tensor)
        return len(self.destinations) - 1

    def copy(self, source: int, box: Sequence[tuple[int, int]], destination: int, view: Tensor) -> None:
        """Copy a box of a source to a view of a destination that has the box's shape."""
        view.copy_(self.sources[source][tuple(slice(*part) for part in box)])
        low, high = [a for a, _ in box], [b for _, b in box]
        rest = MAX_DIMS - len(box)
        strides = [*view.stride(), *[0] * rest]
        self._copies.append(
            [source, *low, *[0] * rest, *high, *[1] * rest, destination, view.storage_offset(), *strides]
        )

    def fill(self, destination: int, view: Tensor, value: float = 0.0) -> None:
        """Set a view of a destination to a constant."""
        view.fill_(value)
        self._fills.append((destination, view, value))

    def trace(self, untraced: Sequence[int] = ()) -> Trace:
        """Everything as a tracer would tell it."""
        rows = np.array(self._copies, dtype=np.int64).reshape(-1, 3 + 3 * MAX_DIMS)
        d = MAX_DIMS
        specs = [DestinationSpec(f"d{i}", tuple(t.shape), t.stride(), t.dtype) for i, t in enumerate(self.destinations)]
        return Trace(
            tuple(TensorSpec(f"s{i}", tuple(t.shape), t.dtype) for i, t in enumerate(self.sources)),
            tuple(specs),
            Copies(
                source=rows[:, 0],
                low=rows[:, 1 : 1 + d],
                high=rows[:, 1 + d : 1 + 2 * d],
                destination=rows[:, 1 + 2 * d],
                offset=rows[:, 2 + 2 * d],
                strides=rows[:, 3 + 2 * d :],
            ),
            self._fill_table(),
            {f"d{i}": "for the test" for i in untraced},
            (),
        )

    def _fill_table(self) -> Fills:
        def padded(values: Sequence[int], filler: int) -> list[int]:
            return [*values, *[filler] * (MAX_DIMS - len(values))]

        return Fills(
            np.array([d for d, _, _ in self._fills], dtype=np.int64),
            np.array([view.storage_offset() for _, view, _ in self._fills], dtype=np.int64),
            np.array([padded(view.shape, 1) for _, view, _ in self._fills], dtype=np.int64).reshape(-1, MAX_DIMS),
            np.array([padded(view.stride(), 0) for _, view, _ in self._fills], dtype=np.int64).reshape(-1, MAX_DIMS),
            np.array([value for _, _, value in self._fills], dtype=np.float64),
        )
