"""The driver's reference to a batch whose samples are kept on the workers: indices and [N]-sized columns.

Each worker keeps its results in blocks, which are batches of its own rows, and hands out handles. A `Piece` says for
some columns in which block, and in which row of it, every sample is. Selecting, reordering and joining touch only
indices; a worker that receives a reference resolves it to a `Batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.batch.batch import Batch, Column, check_name, sample_index
from hybrid_rl.batch.fields import FIELDS
from hybrid_rl.batch.samples import Readable
from hybrid_rl.batch.texts import Reader
from hybrid_rl.errors import DataError

Get = Callable[[Any], Batch]
# Object columns that are kept on the driver: a few bytes per sample, whatever its length.
SMALL_OBJECTS = ("finish_reason", "function_rewards")


@dataclass(frozen=True, eq=False)
class Piece:
    """The location of some columns of N samples. names: of the columns; blocks: handles; block, row: int64 [N], the
    index of each sample's block in `blocks`, and its row within that block."""

    names: tuple[str, ...]
    blocks: tuple[Any, ...]
    block: Tensor
    row: Tensor

    def select(self, index: Tensor) -> Piece:
        """Return the samples at int64 [M], without blocks that are no longer needed."""
        if not index.numel():
            # One block must stay, because it defines the dtype of the columns.
            return Piece(self.names, self.blocks[:1], self.block[index], self.row[index])
        used, block = self.block[index].unique(return_inverse=True)
        return Piece(self.names, tuple(self.blocks[i] for i in used.tolist()), block, self.row[index])

    def resolve(self, get: Get) -> Batch:
        """Fetch the columns themselves, samples in order."""
        batches = [get(handle) for handle in self.blocks]
        if len(batches) == 1:
            whole = batches[0]
            start = torch.zeros(1, dtype=torch.int64)
        else:
            start = torch.tensor([0, *(batch.num_samples for batch in batches)]).cumsum(0)[:-1]
            whole = Batch.concat(batches)
        places = start[self.block] + self.row
        in_order = places.numel() == whole.num_samples and torch.equal(places, torch.arange(places.numel()))
        return whole if in_order else whole.select(places)


class BatchRef(Readable):
    """N samples that are kept on workers. Immutable, as `Batch` is.

    As a mapping it holds the resident columns, which are [N]-sized; `columns` names all of them. num_samples: needed if
    there is no column to infer it from.
    """

    def __init__(
        self,
        resident: Mapping[str, Column],
        pieces: Sequence[Piece] = (),
        get: Get | None = None,
        *,
        num_samples: int | None = None,
    ) -> None:
        self._resident: Mapping[str, Column] = Batch(resident) if resident else {}
        self._pieces = tuple(pieces)
        self._get = get
        sizes = {len(column) for column in self._resident.values()} | {len(piece.block) for piece in self._pieces}
        sizes |= set() if num_samples is None else {num_samples}
        if len(sizes) != 1:
            raise DataError(f"the columns of a reference must have one number of samples, not {sorted(sizes)}")
        self.num_samples: int = sizes.pop()
        names = [*self._resident, *(name for piece in self._pieces for name in piece.names)]
        if len(set(names)) != len(names):
            raise DataError(f"columns {sorted({n for n in names if names.count(n) > 1})} are in the batch twice")
        self.columns = frozenset(names)

    def __getitem__(self, name: str) -> Any:
        check_name(name)
        if name in self.columns and name not in self._resident:
            raise KeyError(f"column {name!r} is kept on the workers; load() brings the whole batch here")
        if name not in self._resident:
            raise KeyError(f"batch has no column {name!r}; it has {sorted(self.columns)}")
        return self._resident[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._resident)

    def __len__(self) -> int:
        return len(self._resident)

    def __repr__(self) -> str:
        kept = "kept on the ranks: samples(), to_pandas(), show() and load() bring them here"
        return self._lines("BatchRef", kept, sorted(self.columns))

    def _columns_known(self) -> frozenset[str]:
        return self.columns

    def with_reader(self, tokenizer: Any, reward_names: Sequence[str] = ()) -> BatchRef:
        return self.with_get(self._get)._read_by(Reader(tokenizer, tuple(reward_names)))

    def with_columns(self, **columns: Column) -> BatchRef:
        """Return a reference with these [N]-sized columns added. Raises DataError if a column exists already."""
        self._refuse(columns)
        resident = {**self._resident, **columns}
        return BatchRef(resident, self._pieces, self._get, num_samples=self.num_samples)._read_by(self._reader)

    def merge(self, other: BatchRef) -> BatchRef:
        """Return a reference with the columns of both. They must have the same samples in the same order."""
        self._refuse(other.columns)
        if other.num_samples != self.num_samples:
            raise DataError(f"references of {self.num_samples} and {other.num_samples} samples cannot be merged")
        resident, pieces = {**self._resident, **other._resident}, (*self._pieces, *other._pieces)
        return BatchRef(resident, pieces, self._get, num_samples=self.num_samples)._read_by(self._reader)

    def joined(self, other: BatchRef) -> BatchRef:
        """Return a reference with the columns of this one and those that only the other one has. Both were made from
        one reference, by adding columns."""
        resident = {name: column for name, column in other._resident.items() if name not in self.columns}
        pieces = [piece for piece in other._pieces if not self.columns.issuperset(piece.names)]
        return self.merge(BatchRef(resident, pieces, self._get, num_samples=other.num_samples))

    def select(self, indices: Tensor | Sequence[int]) -> BatchRef:
        """Return the samples at `indices` (int64 [M] or a list), in that order."""
        index = sample_index(indices)
        resident = Batch(self._resident).select(index) if self._resident else {}
        pieces = [piece.select(index) for piece in self._pieces]
        return BatchRef(resident, pieces, self._get, num_samples=index.numel())._read_by(self._reader)

    @staticmethod
    def concat(refs: Sequence[BatchRef]) -> BatchRef:
        """Return the samples of all references, in order. All must have the same columns, in the same pieces."""
        first = refs[0]
        if len({(frozenset(ref), frozenset(piece.names for piece in ref._pieces)) for ref in refs}) != 1:
            raise DataError(f"references differ in their columns: {[sorted(ref.columns) for ref in refs]}")
        pieces = []
        for names in (piece.names for piece in first._pieces):
            parts = [next(piece for piece in ref._pieces if piece.names == names) for ref in refs]
            parts = [part for part in parts if len(part.block)] or parts[:1]
            starts = torch.tensor([0, *(len(part.blocks) for part in parts)]).cumsum(0).tolist()
            block = torch.cat([part.block + start for part, start in zip(parts, starts, strict=False)])
            blocks = tuple(handle for part in parts for handle in part.blocks)
            pieces.append(Piece(names, blocks, block, torch.cat([part.row for part in parts])))
        resident = Batch.concat([Batch(ref._resident) for ref in refs]) if first._resident else {}
        num_samples = sum(ref.num_samples for ref in refs)
        return BatchRef(resident, pieces, first._get, num_samples=num_samples)._read_by(first._reader)

    def resolve(self, get: Get, *, objects: bool = True) -> Batch:
        """Fetch the samples with `get`. objects: whether to include columns of Python objects."""
        pieces = [piece for piece in self._pieces if objects or not _holds_objects(piece.names)]
        return Batch({**self._resident, **{n: c for piece in pieces for n, c in piece.resolve(get).items()}})

    def load(self) -> Batch:
        """Bring the whole batch to this process."""
        if self._get is None:
            raise DataError("this reference was not made by a worker group: it cannot be loaded here")
        return self.resolve(self._get)._read_by(self._reader)

    def with_get(self, get: Get | None) -> BatchRef:
        """Return the same samples, to be loaded with `get`."""
        return BatchRef(self._resident, self._pieces, get, num_samples=self.num_samples)._read_by(self._reader)

    def group_rows(self) -> list[list[int]]:
        """Sample indices of each group, groups in order of first appearance."""
        return Batch({"group": self["group"]}).group_rows()

    def _refuse(self, names: Collection[str]) -> None:
        taken = sorted(set(names) & self.columns)
        if taken:
            raise DataError(f"columns {taken} are already in the batch and are never overwritten; drop them first")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_get": None, "_reader": None}  # each process fetches and reads in its own way


AnyBatch = Batch | BatchRef


def store(batch: Batch, put: Callable[[Batch], Any], known: Collection[str] = frozenset()) -> BatchRef:
    """Keep a batch on this worker: [N]-sized columns go into the reference, the others into blocks stored with `put`.

    known: columns to leave out, because the receiver of the reference already has them. Tensors and Python objects go
    into separate blocks, because most calls need only the tensors.
    """
    columns = {name: column for name, column in batch.items() if name not in known}
    resident = {name: column for name, column in columns.items() if _is_resident(name)}
    others = [name for name in columns if name not in resident]
    pieces = []
    for wants_objects in (False, True):
        names = tuple(sorted(name for name in others if _holds_objects((name,)) is wants_objects))
        if names:
            handle = put(Batch({name: columns[name] for name in names}))
            rows = torch.arange(batch.num_samples)
            pieces.append(Piece(names, (handle,), torch.zeros_like(rows), rows))
    return BatchRef(resident, pieces, num_samples=batch.num_samples)


def _is_resident(name: str) -> bool:
    return FIELDS[name].align == "sample" or name in SMALL_OBJECTS


def _holds_objects(names: Sequence[str]) -> bool:
    return FIELDS[names[0]].align == "object"
