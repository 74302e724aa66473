"""Tables of copies, as columns of integers: thousands of small copies without a Python object for each.

A global tensor is contiguous; its elements are numbered row by row. Tensors have at most MAX_DIMS dims here; rows of
fewer dims are padded at the end with extents of 1 and strides of 0. All columns are int64; offsets and strides count
elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

MAX_DIMS = 4
Column = npt.NDArray[np.int64]
Rows = TypeVar("Rows", bound="Table")


@dataclass(frozen=True)
class Table:
    """Columns of equal length."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def select(self: Rows, rows: Any) -> Rows:
        """Return the rows of an index array, a mask or a slice, as a table."""
        return type(self)(**{item.name: getattr(self, item.name)[rows] for item in fields(self)})

    def content(self) -> bytes:
        """Return all columns as bytes, for a digest."""
        return b"".join(np.ascontiguousarray(getattr(self, item.name)).tobytes() for item in fields(self))

    @classmethod
    def join(cls: type[Rows], tables: Sequence[Rows]) -> Rows:
        """Return the rows of several tables (at least one), one after the other."""
        return cls(**{f.name: np.concatenate([getattr(table, f.name) for table in tables]) for f in fields(cls)})


@dataclass(frozen=True)
class Copies(Table):
    """The copies of an engine's loader: each row copies one box of a global source tensor to a destination tensor.

    source [R]: index of the global tensor.
    low, high [R, MAX_DIMS]: the box in it, high excluded.
    destination [R]: index of the engine's tensor.
    offset [R]: of the element `low` in the destination, from that tensor's first element.
    strides [R, MAX_DIMS]: step in the destination's memory along each dim of the source.
    """

    source: Column
    low: Column
    high: Column
    destination: Column
    offset: Column
    strides: Column


@dataclass(frozen=True)
class Pieces(Table):
    """The reads of one rank from the local tensors of the ranks that hold a source, and their destinations.

    source, source_rank [P]: the global tensor, and the rank whose part is read; the part is contiguous in its memory.
    source_offset [P], source_strides [P, MAX_DIMS]: in that part.
    destination, destination_offset [P], destination_strides [P, MAX_DIMS]: in the engine's tensor, from its first
    element.
    shape [P, MAX_DIMS]: extents.
    global_offset [P], global_strides [P, MAX_DIMS]: element number of the first element in the global tensor, and the
    step along each dim; they key the content hash.
    """

    source: Column
    source_rank: Column
    source_offset: Column
    source_strides: Column
    destination: Column
    destination_offset: Column
    destination_strides: Column
    shape: Column
    global_offset: Column
    global_strides: Column

    @property
    def num_elements(self) -> Column:
        """Elements of each piece, int64 [P]."""
        return self.shape.prod(axis=1)
