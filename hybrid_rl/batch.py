"""The one data structure that travels: N samples as named, immutable, aligned columns.

A column is a `Tensor [N]`, a `Jagged` (one variable-length row per sample), or a list of N Python objects. `FIELDS`
names every column of the library with its alignment, dtype, writer and the value it holds where nothing was produced.
Token ids go in and token ids come out: no text in a batch is ever tokenised again.
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.errors import DataError

Alignment = Literal["sample", "prompt", "completion", "sequence", "object"]


@dataclass(frozen=True)
class Field:
    """What a column holds. `align` says along what it runs: [N] for "sample", else one row per sample."""

    align: Alignment
    dtype: torch.dtype | None
    writer: str
    masked: Any
    doc: str


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "prompt_ids": Field("prompt", torch.int64, "collector", None, "token ids that the model was shown"),
        "completion_ids": Field(
            "completion", torch.int64, "collector", None, "token ids that followed, final EOS kept"
        ),
        "completion_mask": Field("completion", torch.bool, "collector", False, "True where the policy made the token"),
        "rollout_logprobs": Field("completion", torch.float32, "collector", 0.0, "ln p of the sampling distribution"),
        "policy_version": Field("completion", torch.int64, "collector", -1, "version of the weights behind each token"),
        "group": Field("sample", torch.int64, "collector", None, "globally unique id of the prompt's group"),
        "trajectory": Field("sample", torch.int64, "collector", None, "globally unique id of the sample's trajectory"),
        "turn": Field("sample", torch.int64, "collector", None, "turn within the trajectory, from 0"),
        "finish_reason": Field("object", None, "collector", None, '"stop", "length" or "abort"'),
        "prompt": Field("object", None, "collector", None, "the prompt as the dataset gave it: text or chat messages"),
        "completion": Field("object", None, "collector", None, "the completion as text, special tokens left out"),
        "row": Field("object", None, "collector", None, "the dataset's other columns, as a dict"),
        "rewards": Field("sample", torch.float64, "collector", float("nan"), "weighted reward; NaN = failed, masked"),
        "function_rewards": Field("object", None, "collector", None, "one reward (or NaN) per reward function"),
        "token_rewards": Field("completion", torch.float32, "collector", 0.0, "dense rewards, one per token"),
        "old_logprobs": Field("completion", torch.float32, "actor", 0.0, "ln p at the start of the training step"),
        "ref_logprobs": Field("completion", torch.float32, "reference", 0.0, "ln p of the reference model"),
        "values": Field("completion", torch.float32, "critic", 0.0, "value estimates"),
        "advantages": Field("completion", torch.float32, "actor", 0.0, "advantage of each token"),
        "returns": Field("completion", torch.float32, "critic", 0.0, "value targets"),
    }
)


@dataclass(frozen=True, eq=False)
class Jagged:
    """Rows of different lengths in one tensor.

    values: [total, ...]; offsets: int64 [N + 1], from 0 to total, never falling. Row i is
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
        """rows: N tensors [length_i, ...] or N lists of numbers."""
        tensors = [row if isinstance(row, Tensor) else torch.tensor(row, dtype=dtype) for row in rows]
        if not tensors:
            return cls(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64))
        values = torch.cat(tensors)
        return cls(values if dtype is None else values.to(dtype), lengths_to_offsets([len(t) for t in tensors]))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def __getitem__(self, index: int) -> Tensor:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values.split(self.lengths.tolist()))

    @property
    def lengths(self) -> Tensor:
        """int64 [N]."""
        return self.offsets.diff()

    def select(self, indices: Tensor) -> Jagged:
        """The rows at `indices` (int64 [M]), in that order."""
        lengths = self.lengths[indices]
        offsets = lengths_to_offsets(lengths)
        within = torch.arange(int(offsets[-1]), device=self.values.device) - offsets[:-1].repeat_interleave(lengths)
        return Jagged(self.values[self.offsets[:-1][indices].repeat_interleave(lengths) + within], offsets)

    def to_padded(self, value: float | int | bool, length: int | None = None) -> Tensor:
        """[N, longest, ...], rows on the left, `value` behind them."""
        longest = int(self.lengths.max()) if length is None and len(self) else (length or 0)
        out = self.values.new_full((len(self), longest, *self.values.shape[1:]), value)
        mask = torch.arange(longest, device=self.values.device) < self.lengths[:, None]
        out[mask] = self.values
        return out

    def with_values(self, values: Tensor) -> Jagged:
        """The same rows holding other values ([total, ...])."""
        return Jagged(values, self.offsets)

    def row_sum(self) -> Tensor:
        """Sum of each row, [N, ...]; 0 for an empty row."""
        out = self.values.new_zeros((len(self), *self.values.shape[1:]))
        return out.index_add_(0, self.row_index(), self.values)

    def row_index(self) -> Tensor:
        """The row of every value, int64 [total]."""
        return torch.arange(len(self), device=self.values.device).repeat_interleave(self.lengths)


def lengths_to_offsets(lengths: Tensor | Sequence[int]) -> Tensor:
    """int64 [N] lengths to int64 [N + 1] offsets."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


Column = Tensor | Jagged | list[Any]


class Batch(Mapping[str, Column]):
    """N samples. Immutable: `with_columns` returns a new batch and refuses to overwrite."""

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
        try:
            return self._columns[name]
        except KeyError:
            where = f"; {FIELDS[name].writer} writes it" if name in FIELDS else ""
            raise KeyError(f"batch has no column {name!r}{where}; it has {sorted(self._columns)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Batch({self.num_samples} samples: {', '.join(self._columns)})"

    def with_columns(self, **columns: Column) -> Batch:
        """A batch with these columns added. Raises DataError where a column exists already."""
        taken = sorted(set(columns) & set(self._columns))
        if taken:
            raise DataError(f"columns {taken} are already in the batch and are never overwritten; drop them first")
        return Batch({**self._columns, **columns})

    def without(self, *names: str) -> Batch:
        """A batch without these columns (which must be there)."""
        missing = sorted(set(names) - set(self._columns))
        if missing:
            raise DataError(f"columns {missing} are not in the batch; it has {sorted(self._columns)}")
        return Batch({name: column for name, column in self._columns.items() if name not in names})

    def select(self, indices: Tensor | Sequence[int]) -> Batch:
        """The samples at `indices` (int64 [M] or a list), in that order."""
        index = torch.as_tensor(indices)
        if index.numel() and (index.is_floating_point() or index.dtype == torch.bool):
            raise DataError(f"samples are selected by int64 indices, not {index.dtype}; a mask has .nonzero()[:, 0]")
        index = index.to(torch.int64)
        chosen = index.tolist()
        return Batch({name: _take(column, index, chosen) for name, column in self._columns.items()})

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The samples of all batches, in order. All must have the same columns."""
        if len({frozenset(batch) for batch in batches}) != 1:
            raise DataError(f"batches differ in their columns: {[sorted(batch) for batch in batches]}")
        return Batch({name: _concat([batch[name] for batch in batches]) for name in batches[0]})

    def group_rows(self) -> list[list[int]]:
        """Sample indices of each group, groups in order of first appearance."""
        rows: dict[int, list[int]] = {}
        for index, group in enumerate(self["group"].tolist()):
            rows.setdefault(group, []).append(index)
        return list(rows.values())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpack, ({name: _pack(column, int(protocol)) for name, column in self._columns.items()},)


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
    for name, column in columns.items():
        if FIELDS[name].align == "completion" and isinstance(column, Jagged):
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


# Tensors leave as numpy views: numpy's protocol-5 pickling hands their memory out of band, so that a transport with
# `buffer_callback` moves no bytes. bfloat16, which numpy lacks, goes as its bits.
def _pack(column: Column, protocol: int) -> tuple[str, Any]:
    def buffer(tensor: Tensor) -> tuple[Any, str, tuple[int, ...]]:
        flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return (pickle.PickleBuffer(flat) if protocol >= 5 else flat.tobytes()), str(tensor.dtype), tuple(tensor.shape)

    if isinstance(column, Jagged):
        return "jagged", (buffer(column.values), buffer(column.offsets))
    if isinstance(column, Tensor):
        return "tensor", buffer(column)
    return "object", column


def _unpack(packed: Mapping[str, tuple[str, Any]]) -> Batch:
    def tensor(raw: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
        name = getattr(torch, dtype.removeprefix("torch."))
        data = np.frombuffer(raw, dtype=np.uint8)
        if not data.size:
            return torch.empty(shape, dtype=name)
        # A read-only buffer (in-band pickling) is copied: torch has no read-only tensors.
        return torch.from_numpy(data if data.flags.writeable else data.copy()).view(name).reshape(shape)

    decode: dict[str, Callable[[Any], Column]] = {
        "jagged": lambda payload: Jagged(tensor(*payload[0]), tensor(*payload[1])),
        "tensor": lambda payload: tensor(*payload),
        "object": lambda payload: payload,
    }
    return Batch({name: decode[kind](payload) for name, (kind, payload) in packed.items()})
