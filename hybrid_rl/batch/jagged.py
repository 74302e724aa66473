"""Rows of different lengths in one tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor

from hybrid_rl.errors import DataError


@dataclass(frozen=True, eq=False)
class Jagged:
    """Rows of different lengths in one tensor.

    values: [total, ...]; offsets: int64 [N + 1], from 0 to total, never decreasing. Row i is
    values[offsets[i]:offsets[i+1]].
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        offsets = self.offsets
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() < 1:
            raise DataError(f"offsets must be int64 [N + 1], not {offsets.dtype} {tuple(offsets.shape)}")
        if int(offsets[0]) != 0 or int(offsets[-1]) != self.values.shape[0] or bool((offsets.diff() < 0).any()):
            raise DataError(f"offsets must rise from 0 to {self.values.shape[0]} (the number of values)")

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Jagged:
        """Join N tensors [length_i, ...], or N lists of numbers, to one column."""
        tensors = [row if isinstance(row, Tensor) else torch.tensor(row, dtype=dtype) for row in rows]
        if not tensors:
            return cls(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64))
        values = torch.cat(tensors)
        return cls(values if dtype is None else values.to(dtype), lengths_to_offsets([len(t) for t in tensors]))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @overload
    def __getitem__(self, index: SupportsIndex) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Jagged: ...

    def __getitem__(self, index: Any) -> Tensor | Jagged:
        """Return one row by its number (negative: from the end), or several by a slice, as a column again."""
        if isinstance(index, slice):
            rows = range(*index.indices(len(self)))
            return self.select(torch.tensor(rows, dtype=torch.int64, device=self.offsets.device))
        try:
            row = operator.index(index)
        except TypeError:
            raise TypeError(
                f"rows of a column are indexed by a number or a slice, not by {index!r:.100} of type "
                f"{type(index).__name__}; select(tensor of row numbers) returns any rows, in any order"
            ) from None
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values.split(self.lengths.tolist()))

    @property
    def lengths(self) -> Tensor:
        """Length of each row, int64 [N]."""
        return self.offsets.diff()

    def select(self, indices: Tensor) -> Jagged:
        """Return the rows at `indices` (int64 [M]), in that order."""
        lengths = self.lengths[indices]
        offsets = lengths_to_offsets(lengths)
        within = torch.arange(int(offsets[-1]), device=self.values.device) - offsets[:-1].repeat_interleave(lengths)
        return Jagged(self.values[self.offsets[:-1][indices].repeat_interleave(lengths) + within], offsets)

    def with_values(self, values: Tensor) -> Jagged:
        """Return a column with the same row lengths and other values ([total, ...])."""
        return Jagged(values, self.offsets)

    def row_index(self) -> Tensor:
        """The row of every value, int64 [total]."""
        return torch.arange(len(self), device=self.values.device).repeat_interleave(self.lengths)


def lengths_to_offsets(lengths: Tensor | Sequence[int]) -> Tensor:
    """Return int64 [N + 1] offsets of int64 [N] lengths."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
