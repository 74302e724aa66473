"""Prompt sources: datasets of known length, tokenised at once, and streams, tokenised as their rows arrive."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_rl.data.formats import Format
from hybrid_rl.data.gym_rows import gym_rows, is_gym
from hybrid_rl.data.nulls import NullCleaner
from hybrid_rl.data.prompts import (
    MEDIA_COLUMNS,
    PROMPT_COLUMN,
    PromptEncoder,
    PromptKind,
    PromptRow,
    check_column_names,
    check_media,
)
from hybrid_rl.data.rendering import TEMPLATE_COLUMNS
from hybrid_rl.data.row_reading import Reader, ReadRows
from hybrid_rl.data.rows import (
    CHUNK_ROWS,
    ArrowRows,
    HubRows,
    Rows,
    SequenceRows,
    frame_table,
    is_instance,
    read_path,
    row_columns,
)
from hybrid_rl.errors import DataError, shorten

# Otherwise an endless stream of overlong prompts would be skipped for ever.
_MAX_DROPS_IN_A_ROW = 10_000


class SizedSource:
    """A dataset of known length. All rows are checked and all prompts tokenised when it is made.

    Token ids are kept as one int32 array; the other columns are read when a row is requested.

    Attributes:
        column_names: the dataset's columns, `prompt` included, and those that its format adds.
        kind: of all prompts.
        num_rows: of the dataset, those of dropped prompts included.
        note: how the rows are read, for people; empty if they are taken as they are.
        is_gym: whether the rows are problems of reasoning-gym, which scores them.
        fingerprint: hash of all token ids and row indices; equal for equal prompts under an equal tokenizer.
    """

    def __init__(self, rows: Rows | ReadRows, encoder: PromptEncoder, note: str = "") -> None:
        """note: how the rows are read, for people."""
        self.note, self.is_gym = note, False
        if len(rows) == 0:
            raise DataError("the dataset is empty; give at least one row with a `prompt`")
        self._rows, self.num_rows = rows, len(rows)
        self._empty = encoder.empty_prompt
        self.column_names: tuple[str, ...] = rows.column_names
        for name in (name for name in MEDIA_COLUMNS if name in rows.column_names):
            for index, value in enumerate(rows.values(name)):
                check_media({name: value}, index)
        kept: list[npt.NDArray[np.int64]] = []
        lengths: list[npt.NDArray[np.int64]] = []
        chunks: list[npt.NDArray[np.int32]] = []
        over: list[tuple[int, int]] = []  # (row, tokens)
        self._has_prompts = PROMPT_COLUMN in rows.column_names
        for_template = [name for name in TEMPLATE_COLUMNS if name in rows.column_names]
        with _collector_paused():
            kind = encoder.kind(rows.prompts(0, 1)[0] if self._has_prompts else self._empty, 0)
            self.kind: PromptKind = kind
            for start in range(0, len(rows), CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, len(rows))
                prompts = rows.prompts(start, stop)
                if not self._has_prompts:
                    prompts = [self._empty] * len(prompts)
                indices = np.arange(start, stop)
                values = zip(*(rows.prompts(start, stop, name) for name in for_template), strict=True)
                columns = [dict(zip(for_template, row, strict=True)) for row in values] if for_template else None
                ids = encoder.encode(prompts, range(start, stop), kind, columns)
                num_tokens = _lengths(ids)
                longer = np.flatnonzero(num_tokens > (encoder.max_prompt_length or math.inf))
                if longer.size:
                    over += zip(indices[longer].tolist(), num_tokens[longer].tolist(), strict=True)
                    if encoder.overlong_prompts == "error":
                        continue  # read all rows, so that one message names all that are too long
                    limited = [encoder.limit(prompt_ids, start + place) for place, prompt_ids in enumerate(ids)]
                    indices = indices[[prompt_ids is not None for prompt_ids in limited]]
                    ids = [prompt_ids for prompt_ids in limited if prompt_ids is not None]
                    num_tokens = _lengths(ids)
                kept.append(indices)
                lengths.append(num_tokens)
                chunks.append(np.fromiter(chain.from_iterable(ids), np.int32, count=int(num_tokens.sum())))
        if over and encoder.overlong_prompts == "error":
            raise encoder.overlong_error(len(over), max(length for _, length in over), over[0][0])
        self._kept = np.concatenate(kept)
        if not self._kept.size:
            shortest = min(length for _, length in over)
            raise DataError(
                f"all {len(rows)} prompts are longer than max_prompt_length={encoder.max_prompt_length} and were "
                f"dropped; the shortest has {shortest} tokens: {encoder.remedy(shortest)}"
            )
        self._offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)])
        self._ids = np.concatenate(chunks)
        self.fingerprint = digest(self._kept.tobytes(), self._offsets.tobytes(), self._ids.tobytes())

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt."""
        return int(np.diff(self._offsets).max())

    def __len__(self) -> int:
        """Number of prompts, without dropped rows."""
        return len(self._kept)

    def __getitem__(self, position: int) -> PromptRow:
        """Return the prompt at `position` in 0 .. len - 1, not counting dropped rows. Raises IndexError beyond that."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside the {len(self)} prompts of the dataset")
        index = int(self._kept[position])
        ids = self._ids[self._offsets[position] : self._offsets[position + 1]]
        row = self._rows.row(index)
        prompt = row[PROMPT_COLUMN] if self._has_prompts else self._empty
        return PromptRow(index, prompt, tuple(ids.tolist()), _other_columns(row), self._has_prompts)

    def prompt_keys(self) -> Iterator[bytes]:
        """Yield for each prompt what is equal for equal token ids; nothing if rows have no prompts."""
        bounds = self._offsets.tolist() if self._has_prompts else []
        return (self._ids[start:stop].tobytes() for start, stop in pairwise(bounds))

    def position(self, index: int) -> int:
        """Return the position of the prompt of a row, given the row's index in the dataset."""
        return int(np.searchsorted(self._kept, index))

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row, those of dropped rows too."""
        return self._rows.values(name)


class StreamSource:
    """Rows that arrive one by one, checked and tokenised as they arrive. The first one is read at construction.

    Attributes:
        column_names: columns of the first row, `prompt` included; every later row must have the same.
        fingerprint: hash of the column names and of the first row's token ids.
    """

    def __init__(self, open_rows: Callable[[int], Iterable[Any]], encoder: PromptEncoder) -> None:
        """open_rows: starts a pass over the rows, given the number of the pass."""
        self._open_rows = open_rows
        self._encoder = encoder
        self._reader = Reader(encoder)
        self._shortest_dropped = 2**62
        for row in open_rows(0):
            self._columns = row_columns(row, 0, None)
            self._reader.look_at(self._columns, row, "row 0")
            self.column_names: tuple[str, ...] = self._reader.names(self._columns)
            check_column_names(self.column_names, "row 0", needs_prompt=encoder.needs_prompts)
            row = self._reader.row(row, 0)
            self._has_prompts = PROMPT_COLUMN in self.column_names
            self._kind = encoder.kind(self._prompt_of(row), 0)
            ids = self._ids_of(row, 0)
            break
        else:
            raise DataError("the stream is empty; it must yield at least one row with a `prompt`")
        self.fingerprint = digest(json.dumps([sorted(self.column_names), ids]).encode())

    @property
    def note(self) -> str:
        """How the rows are read, for people."""
        return self._reader.note

    def __iter__(self) -> Iterator[PromptRow]:
        return self.iterate()

    def iterate(self, start: int = 0, epoch: int = 0) -> Iterator[PromptRow]:
        """Yield the prompts of one pass.

        Args:
            start: rows to skip without tokenising them (dropped rows count).
            epoch: number of the pass; given to the `set_epoch` of a shuffled `IterableDataset`.

        Raises:
            DataError: a bad row; fewer than `start` rows; a pass without a usable prompt.
        """
        rows = enumerate(self._open_rows(epoch))
        num_skipped = sum(1 for _ in islice(rows, start))
        if num_skipped < start:
            raise DataError(
                f"the stream ended after {num_skipped} rows of pass {epoch}, but {start} were taken before; resuming "
                "needs a stream that yields the same rows in the same order: restore it or start a new run"
            )
        num_prompts = num_dropped = 0
        for index, raw_row in rows:
            row_columns(raw_row, index, self._columns)
            row = self._reader.row(raw_row, index)
            ids = self._encode(row, index)
            if ids is None:
                num_dropped += 1
                if num_dropped >= _MAX_DROPS_IN_A_ROW:
                    raise self._all_dropped(num_dropped, index)
                continue
            num_prompts += 1
            num_dropped = 0
            yield PromptRow(index, self._prompt_of(row), tuple(ids), _other_columns(row), self._has_prompts)
        if start == 0 and num_prompts == 0:
            if num_dropped:
                raise self._all_dropped(num_dropped, num_dropped - 1)
            raise DataError(
                f"the stream yielded no row in pass {epoch}; pass a function that returns a new iterator at every call"
            )

    def _encode(self, row: Any, index: int) -> list[int] | None:
        ids = self._ids_of(row, index)
        limited = self._encoder.limit(ids, index)
        if limited is None:
            self._shortest_dropped = min(len(ids), self._shortest_dropped)
        return limited

    def _ids_of(self, row: Any, index: int) -> list[int]:
        return self._encoder.encode([self._prompt_of(row)], [index], self._kind, [row])[0]

    def _prompt_of(self, row: Mapping[str, Any]) -> Any:
        return row[PROMPT_COLUMN] if self._has_prompts else self._encoder.empty_prompt

    def _all_dropped(self, num_dropped: int, last_row: int) -> DataError:
        return DataError(
            f"{num_dropped} rows in a row, up to row {last_row}, are longer than "
            f"max_prompt_length={self._encoder.max_prompt_length} and were dropped; the shortest has "
            f"{self._shortest_dropped} tokens: {self._encoder.remedy(self._shortest_dropped)}"
        )


def load_source(dataset: Any, encoder: PromptEncoder) -> SizedSource | StreamSource:
    """Make a prompt source from whatever the user has.

    Args:
        dataset: a list of dicts; a `datasets.Dataset` or `IterableDataset`; any object with length and index, or one
            that can be iterated repeatedly; a function that returns a new iterator; a `pyarrow.Table`; a
            `pandas.DataFrame`; a path to JSON lines (`.jsonl`, `.json`), `.parquet`, or a folder (of `save_to_disk`, or
            of JSON files with a row each); a task of reasoning-gym (`reasoning_gym:chain_sum`).
        encoder: tokenises the prompts.

    Raises:
        DataError: the dataset cannot be read, is empty or has a bad row.
    """
    if isinstance(dataset, str | Mapping) and is_gym(dataset):
        problems, form = gym_rows(dataset)
        source = _sized(SequenceRows(problems), encoder, "row 0", form)
        source.is_gym = True
        return source
    if isinstance(dataset, str | os.PathLike):
        dataset = read_path(Path(dataset))
    if is_stream(dataset):
        return StreamSource(_opener(dataset), encoder)
    rows = rows_of(dataset)
    return _sized(rows, encoder, {HubRows: "the dataset", ArrowRows: "the table"}.get(type(rows), "row 0"))


def is_stream(dataset: Any) -> bool:
    """Whether the rows of a dataset arrive one by one: it has no length, but can be iterated or called."""
    if isinstance(dataset, bytes | Mapping) or _is_indexed(dataset) or is_instance(dataset, "pyarrow", "Table"):
        return False
    if hasattr(dataset, "__next__"):
        raise DataError(
            f"the dataset is a one-shot {type(dataset).__name__}, which cannot start again for another epoch or after "
            "a resume; pass the function that makes it (without calling it), or a datasets.IterableDataset"
        )
    return hasattr(dataset, "__iter__") or callable(dataset)


def rows_of(dataset: Any) -> Rows:
    """Return the rows of a dataset of known length, as they are. Raises DataError if it is none."""
    if isinstance(dataset, Mapping):
        raise _mapping_error(dataset)
    if is_instance(dataset, "datasets", "Dataset") and dataset.format["type"] != "custom":
        # (A custom format computes whole rows, and may create the prompt column, so it is read row by row.)
        # (Rows of these formats are tables of one row.)
        is_plain = dataset.format["type"] not in ("arrow", "pandas", "polars")
        return HubRows(dataset if is_plain else dataset.with_format(None))
    if is_instance(dataset, "datasets", "Dataset"):
        return SequenceRows(dataset, NullCleaner(None))
    if is_instance(dataset, "pandas", "DataFrame"):
        dataset = frame_table(dataset)
    if is_instance(dataset, "pyarrow", "Table"):
        if "arrow.json" not in str(dataset.schema):
            return ArrowRows(dataset)
        import datasets  # which reads its type Json

        return HubRows(datasets.Dataset(dataset))
    if isinstance(dataset, bytes) or not _is_indexed(dataset):
        raise DataError(
            f"the dataset {shorten(dataset)} is of type {type(dataset).__name__}; pass a list of dicts, a "
            "datasets.Dataset, a path, or a function that returns an iterator of dicts"
        )
    return SequenceRows(dataset)


def _sized(rows: Rows, encoder: PromptEncoder, where: str, form: Format | None = None) -> SizedSource:
    """Make the source of a dataset of known length. where: the dataset, in messages; form: if it is known."""
    if len(rows) == 0:
        return SizedSource(rows, encoder)
    reader = Reader(encoder)
    reader.look_at(rows.column_names, rows.row(0), where, form)
    check_column_names(reader.names(rows.column_names), where, needs_prompt=encoder.needs_prompts)
    return SizedSource(ReadRows(rows, reader) if reader.changes_rows else rows, encoder, reader.note)


def _opener(dataset: Any) -> Callable[[int], Iterable[Any]]:
    cleaner = None
    if is_instance(dataset, "datasets", "IterableDataset"):
        # (Whether a function that was mapped over the rows added types is unknown: then there are no features.)
        cleaner = NullCleaner(None if dataset.features is None else dataset.features.arrow_schema)

    def open_rows(epoch: int) -> Iterable[Any]:
        if hasattr(dataset, "__iter__"):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            return dataset if cleaner is None else map(cleaner.row, dataset)
        rows = dataset()
        if not hasattr(rows, "__iter__"):
            raise DataError(f"the dataset function returned {shorten(rows)}; it must return an iterator of dicts")
        return rows

    return open_rows


def _is_indexed(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _mapping_error(dataset: Mapping[Any, Any]) -> DataError:
    keys = ", ".join(repr(key) for key in dataset) or "none"
    if any(is_instance(dataset, "datasets", name) for name in ("DatasetDict", "IterableDatasetDict")):
        return DataError(f"the dataset is a DatasetDict with the splits {keys}; pass one, such as dataset['train']")
    keys = keys if len(keys) <= 60 else f"{keys[:57]}..."
    return DataError(
        f"the dataset is a dict with the keys {keys}; pass a list of dicts (one per row), or "
        "datasets.Dataset.from_dict(...) if its values are columns"
    )


def _other_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != PROMPT_COLUMN}


def _lengths(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, rows), np.int64, count=len(rows))


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Disable garbage collection inside the block: thousands of lists of ids would trigger one collection after the
    other, each over all objects of the imported libraries, and take half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def digest(*parts: bytes) -> str:
    """Return a hash of all parts, in hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
