"""Prompt sources: datasets of known length, tokenised at once, and streams, tokenised as their rows arrive."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_rl.data.prompts import (
    PROMPT_COLUMN,
    PromptEncoder,
    PromptRow,
    is_shown_elsewhere,
    shorten,
)
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
from hybrid_rl.errors import DataError

# Otherwise an endless stream of overlong prompts would be skipped for ever.
_MAX_DROPS_IN_A_ROW = 10_000


class SizedSource:
    """A dataset of known length. All rows are checked and all prompts tokenised when it is made.

    Token ids are kept as one int32 array; the other columns are read when a row is requested.

    Attributes:
        column_names: the dataset's columns, `prompt` included.
        fingerprint: hash of all token ids and row indices; equal for equal prompts under an equal tokenizer.
    """

    def __init__(self, rows: Rows, encoder: PromptEncoder) -> None:
        if len(rows) == 0:
            raise DataError("the dataset is empty; give at least one row with a `prompt`")
        self._rows = rows
        self._empty = encoder.empty_prompt
        self.column_names: tuple[str, ...] = rows.column_names
        for name in (name for name in encoder.media_columns if name in rows.column_names):
            for index, value in enumerate(rows.values(name)):
                if is_shown_elsewhere(value):
                    raise encoder.media_error(name, index)
        kept: list[npt.NDArray[np.int64]] = []
        lengths: list[npt.NDArray[np.int64]] = []
        chunks: list[npt.NDArray[np.int32]] = []
        over: list[tuple[int, int]] = []  # (row, tokens)
        self._has_prompts = PROMPT_COLUMN in rows.column_names
        with _collector_paused():
            kind = encoder.kind(rows.prompts(0, 1)[0] if self._has_prompts else self._empty, 0)
            for start in range(0, len(rows), CHUNK_ROWS):
                prompts = rows.prompts(start, min(start + CHUNK_ROWS, len(rows)))
                if not self._has_prompts:
                    prompts = [self._empty] * len(prompts)
                indices = np.arange(start, start + len(prompts))
                ids = encoder.encode(prompts, range(start, start + len(prompts)), kind)
                num_tokens = _lengths(ids)
                longer = np.flatnonzero(num_tokens > (encoder.max_prompt_length or math.inf))
                if longer.size:
                    over += zip(indices[longer].tolist(), num_tokens[longer].tolist(), strict=True)
                    if encoder.overlong_prompts == "error":
                        continue  # read all rows, so that one message names all that are too long
                    limited = [encoder.limit(one, start + place) for place, one in enumerate(ids)]
                    indices = indices[[one is not None for one in limited]]
                    ids = [one for one in limited if one is not None]
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
        self.fingerprint = _digest(self._kept.tobytes(), self._offsets.tobytes(), self._ids.tobytes())

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
        self._shortest_dropped = 2**62
        for row in open_rows(0):
            self.column_names: tuple[str, ...] = row_columns(row, 0, None, needs_prompt=encoder.needs_prompts)
            self._has_prompts = PROMPT_COLUMN in self.column_names
            self._kind = encoder.kind(self._prompt_of(row), 0)
            ids = self._ids_of(row, 0)
            break
        else:
            raise DataError("the stream is empty; it must yield at least one row with a `prompt`")
        self.fingerprint = _digest(json.dumps([sorted(self.column_names), ids]).encode())

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
        for index, row in rows:
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
        row_columns(row, index, self.column_names)
        ids = self._ids_of(row, index)
        limited = self._encoder.limit(ids, index)
        if limited is None:
            self._shortest_dropped = min(len(ids), self._shortest_dropped)
        return limited

    def _ids_of(self, row: Any, index: int) -> list[int]:
        for name in self._encoder.media_columns:
            if is_shown_elsewhere(row.get(name)):
                raise self._encoder.media_error(name, index)
        return self._encoder.encode([self._prompt_of(row)], [index], self._kind)[0]

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
            `pandas.DataFrame`; a path to JSON lines (`.jsonl`, `.json`), `.parquet`, or a `save_to_disk` folder.
        encoder: tokenises the prompts.

    Raises:
        DataError: the dataset cannot be read, is empty or has a bad row.
    """
    if isinstance(dataset, str | os.PathLike):
        dataset = read_path(Path(dataset))
    if isinstance(dataset, Mapping):
        raise _mapping_error(dataset)
    if is_instance(dataset, "datasets", "Dataset") and dataset.format["type"] != "custom":
        # (A custom format computes whole rows, and may create the prompt column, so it is read row by row.)
        return SizedSource(HubRows(dataset, needs_prompt=encoder.needs_prompts), encoder)
    if is_instance(dataset, "pandas", "DataFrame"):
        dataset = frame_table(dataset)
    if is_instance(dataset, "pyarrow", "Table"):
        return SizedSource(ArrowRows(dataset, needs_prompt=encoder.needs_prompts), encoder)
    if isinstance(dataset, bytes) or not (hasattr(dataset, "__iter__") or callable(dataset) or _is_indexed(dataset)):
        raise DataError(
            f"the dataset {shorten(dataset)} is of type {type(dataset).__name__}; pass a list of dicts, a "
            "datasets.Dataset, a path, or a function that returns an iterator of dicts"
        )
    if _is_indexed(dataset):
        return SizedSource(SequenceRows(dataset, needs_prompt=encoder.needs_prompts), encoder)
    if hasattr(dataset, "__next__"):
        raise DataError(
            f"the dataset is a one-shot {type(dataset).__name__}, which cannot start again for another epoch or after "
            "a resume; pass the function that makes it (without calling it), or a datasets.IterableDataset"
        )
    return StreamSource(_opener(dataset), encoder)


def _opener(dataset: Any) -> Callable[[int], Iterable[Any]]:
    def open_rows(epoch: int) -> Iterable[Any]:
        if hasattr(dataset, "__iter__"):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            return dataset
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
    return DataError(
        f"the dataset is a dict with the keys {shorten(keys)}; pass a list of dicts (one per row), or "
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


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
