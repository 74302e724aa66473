"""Rows and columns that no user need see."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any


def row_at(sampler: Any, place: int) -> Any:
    """A row of the data set, by its place among those that are not too long."""
    return sampler._sized[place]


def batches_of(trainer: Any) -> Iterator[Any]:
    """The numbers of the rows in each batch of a warm start."""
    batches: Iterator[Any] = trainer._batches
    return batches


def columns_of(batch: Any) -> MutableMapping[str, Any]:
    """The columns themselves, which refuse to be changed."""
    columns: MutableMapping[str, Any] = batch._columns
    return columns


def pieces_of(ref: Any) -> Sequence[Any]:
    """Where the parts of a batch on the ranks are."""
    pieces: Sequence[Any] = ref._pieces
    return pieces


def reader_of(batch: Any) -> Any:
    """What gives tokens their texts; None where it did not come along."""
    return batch._reader
