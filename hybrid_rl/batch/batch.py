"""The batch: N samples as named, immutable, aligned columns.

A column is a `Tensor [N]`, a `Jagged` (one variable-length row per sample), or a list of N Python objects. `FIELDS`
names every column of the library with its alignment, dtype, writer and its value for what was not produced.
Token ids go in and token ids come out: text in a batch is never tokenised again.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.batch.fields import FIELDS
from hybrid_rl.batch.jagged import Jagged, lengths_to_offsets
from hybrid_rl.batch.samples import Readable
from hybrid_rl.batch.texts import Reader
from hybrid_rl.errors import DataError

Column = Tensor | Jagged | list[Any]


class Batch(Readable):
    """N samples. Immutable: `with_columns` returns a new batch and refuses to overwrite.

    As a mapping it holds columns by name; `samples()`, `to_pandas()` and `show()` show it sample by sample.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        if not columns:
            raise DataError("a batch needs at least one column")
        for name, column in columns.items():
            _check_column(name, column)
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"columns differ in their number of samples: {lengths}")
        _check_alignment(columns)
        self._columns = MappingProxyType(dict(columns))
        self.num_samples: int = next(iter(lengths.values()))

    def __getitem__(self, name: str) -> Any:
        check_name(name)
        try:
            return self._columns[name]
        except KeyError:
            where = f"; {FIELDS[name].writer} writes it" if name in FIELDS else ""
            raise KeyError(f"batch has no column {name!r}{where}; it has {sorted(self._columns)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return self._lines("Batch", "samples(), to_pandas() and show() show them one by one", self)

    def load(self) -> Batch:
        """Return this batch: it is in this process. A `BatchRef`, of many ranks, is brought here by its `load`."""
        return self

    def with_reader(self, tokenizer: Any, reward_names: Sequence[str] = ()) -> Batch:
        return Batch(self._columns)._read_by(Reader(tokenizer, tuple(reward_names)))

    def with_columns(self, **columns: Column) -> Batch:
        """Return a batch with these columns added. Raises DataError if a column exists already."""
        taken = sorted(set(columns) & set(self._columns))
        if taken:
            raise DataError(f"columns {taken} are already in the batch and are never overwritten; drop them first")
        return Batch({**self._columns, **columns})._read_by(self._reader)

    def without(self, *names: str) -> Batch:
        """Return a batch without these columns. Raises DataError if one of them does not exist."""
        missing = sorted(set(names) - set(self._columns))
        if missing:
            raise DataError(f"columns {missing} are not in the batch; it has {sorted(self._columns)}")
        kept = {name: column for name, column in self._columns.items() if name not in names}
        return Batch(kept)._read_by(self._reader)

    def select(self, indices: Tensor | Sequence[int]) -> Batch:
        """Return the samples at `indices` (int64 [M] or a list), in that order."""
        index = sample_index(indices)
        chosen = index.tolist()
        taken = {name: _take(column, index, chosen) for name, column in self._columns.items()}
        return Batch(taken)._read_by(self._reader)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Return the samples of all batches, in order. All must have the same columns."""
        if len({frozenset(batch) for batch in batches}) != 1:
            raise DataError(f"batches differ in their columns: {[sorted(batch) for batch in batches]}")
        joined = {name: _concat([batch[name] for batch in batches]) for name in batches[0]}
        return Batch(joined)._read_by(batches[0]._reader)

    def group_rows(self) -> list[list[int]]:
        """Sample indices of each group, groups in order of first appearance."""
        rows: dict[int, list[int]] = {}
        for index, group in enumerate(self["group"].tolist()):
            rows.setdefault(group, []).append(index)
        return list(rows.values())

    def __reduce__(self) -> Any:
        return _unpack, ({name: _pack(column) for name, column in self._columns.items()},)


def sample_index(indices: Tensor | Sequence[int]) -> Tensor:
    """Return indices of samples as int64 [M]. Raises DataError for masks and fractions."""
    index = torch.as_tensor(indices)
    if index.numel() and (index.is_floating_point() or index.dtype == torch.bool):
        raise DataError(f"samples are selected by int64 indices, not {index.dtype}; for a mask use .nonzero()[:, 0]")
    return index.to(torch.int64)


def check_name(name: object) -> None:
    """Raise TypeError if a value is not the name of a column: a batch is not a list of samples."""
    if not isinstance(name, str):
        raise TypeError(
            f"a batch is indexed by the names of its columns (batch['rewards']), not by {name!r:.100} of type "
            f"{type(name).__name__}; samples() lists its samples, select([0, 1]) takes some"
        )


def _check_column(name: str, column: Column) -> None:
    field = FIELDS.get(name)
    if field is None:
        near = difflib.get_close_matches(name, FIELDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"unknown column {name!r}{hint} Columns are named in hybrid_rl.batch.FIELDS.")
    expected: type = {"object": list, "sample": Tensor}.get(field.align, Jagged)
    if not isinstance(column, expected):
        raise DataError(f"column {name!r} must be a {expected.__name__}, not {type(column).__name__}")
    if isinstance(column, Tensor) and column.dim() != 1:
        raise DataError(f"column {name!r} must be [N], not {list(column.shape)}")
    values = column.values if isinstance(column, Jagged) else column
    if isinstance(values, Tensor) and values.dtype != field.dtype:
        raise DataError(f"column {name!r} must have dtype {field.dtype}, not {values.dtype}")


def _check_alignment(columns: Mapping[str, Column]) -> None:
    reference = columns.get("completion_ids")
    if not isinstance(reference, Jagged):
        return
    prompts = columns.get("prompt_ids")
    for name, column in columns.items():
        if not isinstance(column, Jagged):
            continue
        if FIELDS[name].align == "sequence" and isinstance(prompts, Jagged):
            if torch.equal(column.lengths, prompts.lengths + reference.lengths):
                continue
            raise DataError(f"column {name!r} is not as long as prompt_ids and completion_ids together in every row")
        if FIELDS[name].align == "completion":
            if column.offsets is reference.offsets or torch.equal(column.offsets, reference.offsets):
                continue
            raise DataError(f"column {name!r} is not aligned with completion_ids: its rows have other lengths")


def _take(column: Column, index: Tensor, chosen: list[int]) -> Column:
    if isinstance(column, Jagged):
        return column.select(index)
    if isinstance(column, Tensor):
        return column[index]
    return [column[i] for i in chosen]


def _concat(columns: Sequence[Any]) -> Column:
    first = columns[0]
    if isinstance(first, Jagged):
        lengths = torch.cat([column.lengths for column in columns])
        return Jagged(torch.cat([column.values for column in columns]), lengths_to_offsets(lengths))
    if isinstance(first, Tensor):
        return torch.cat(list(columns))
    return [item for column in columns for item in column]


# Tensors are pickled as numpy views: numpy's protocol 5 passes their memory out of band, so a transport with
# `buffer_callback` copies no bytes. numpy lacks bfloat16, which no column has.
def _pack(column: Column) -> Any:
    if isinstance(column, Jagged):
        return _array(column.values), _array(column.offsets)
    return _array(column) if isinstance(column, Tensor) else column


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.detach().cpu().contiguous().numpy()


def _unpack(packed: Mapping[str, Any]) -> Batch:
    columns: dict[str, Column] = {}
    for name, column in packed.items():
        if isinstance(column, tuple):
            columns[name] = Jagged(*map(_tensor, column))
        else:
            columns[name] = _tensor(column) if isinstance(column, np.ndarray) else column
    return Batch(columns)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    # A read-only buffer is copied: torch has no read-only tensors.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
