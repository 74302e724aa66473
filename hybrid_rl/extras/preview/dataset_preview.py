"""A look at datasets before they are used: what the model will see, lengths, and every row that would be refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_rl.data.gym_rows import gym_rows, is_gym
from hybrid_rl.data.mixture import is_named
from hybrid_rl.data.prompts import PROMPT_COLUMN, PromptEncoder, PromptKind, check_column_names, check_media, shorten
from hybrid_rl.data.row_reading import Reader
from hybrid_rl.data.rows import SequenceRows, read_path, row_columns
from hybrid_rl.data.source import digest, is_stream, rows_of
from hybrid_rl.errors import DataError

QUANTILES = (0.5, 0.9, 0.99, 1.0)
NUM_BINS = 8
STREAM_ROWS = 1000  # of a stream that are looked at
_CHUNK = 512


class NoTokenizer:
    """Stands in for a tokenizer where there is none: prompts are shown as text, and lengths are in characters."""

    chat_template = "messages"


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt as the model will see it. text: with special tokens, if there is a tokenizer; columns: what reward
    functions get."""

    row: int
    text: str
    length: int
    columns: Mapping[str, Any]


@dataclass
class DatasetPreview:
    """What is in one dataset.

    name: as it was given. note: how it is read. columns: for each the types of its values, with their numbers, and a
    value. lengths: of all prompts that can be used, in tokens, or in characters if there is no tokenizer. refused: row
    (or None for a line that cannot be read) and reason. too_long: rows over max_prompt_length. duplicates: pairs of a
    row and the first row with the same prompt. keys: hashes of prompts, with their first row.
    """

    name: str
    num_rows: int = 0
    note: str = ""
    columns: dict[str, tuple[dict[str, int], str]] = field(default_factory=dict)
    shown: list[ShownPrompt] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    unit: str = "tokens"
    limit: int | None = None
    overlong: str = "error"
    refused: list[tuple[int | None, str]] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def would_start(self) -> bool:
        """Whether a run would take this dataset as it is."""
        return bool(self.lengths) and not self.refused and not (self.too_long and self.overlong == "error")

    def quantiles(self) -> dict[str, int]:
        """Return the median and other quantiles of the lengths, `max` included."""
        if not self.lengths:
            return {}
        values = np.quantile(self.lengths, QUANTILES, method="higher").tolist()
        return dict(zip(("50 %", "90 %", "99 %", "max"), map(int, values), strict=True))

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (first length, last length, number of prompts) of a few equal ranges."""
        if not self.lengths:
            return []
        low, high = min(self.lengths), max(self.lengths)
        width = max(-(-(high - low + 1) // NUM_BINS), 1)
        starts = range(low, high + 1, width)
        counts = Counter((length - low) // width for length in self.lengths)
        return [(start, min(start + width - 1, high), counts[place]) for place, start in enumerate(starts)]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        return {
            "name": self.name,
            "rows": self.num_rows,
            "read_as": self.note,
            "would_start": self.would_start,
            "columns": {name: {"types": kinds, "example": example} for name, (kinds, example) in self.columns.items()},
            "lengths": {"unit": self.unit, **self.quantiles(), "histogram": self.histogram()},
            "max_prompt_length": self.limit,
            "over_max_prompt_length": self.too_long,
            "refused": [{"row": row, "why": why} for row, why in self.refused],
            "duplicates": [{"row": row, "first": first} for row, first in self.duplicates],
            "shown": [
                {"row": prompt.row, "text": prompt.text, "length": prompt.length, "columns": _plain(prompt.columns)}
                for prompt in self.shown
            ],
        }


def preview_datasets(dataset: Any, encoder: PromptEncoder, *, num_shown: int = 2) -> list[DatasetPreview]:
    """Look at a dataset, or at several by name; in a form that `load_sources` takes. num_shown: prompts to show.

    Raises DataError for a dataset that cannot be read at all, and ConfigError if reasoning-gym is not installed.
    """
    if isinstance(dataset, Mapping) and not is_gym(dataset) and is_named(dataset):
        return [_preview(part, encoder, str(name), num_shown) for name, part in dataset.items()]
    return [_preview(dataset, encoder, _name_of(dataset), num_shown)]


def overlap(train: Sequence[DatasetPreview], held_out: Sequence[DatasetPreview]) -> list[tuple[str, int, str, int]]:
    """Return the prompts that are in both: dataset and row of evaluation, dataset and row of training."""
    return [
        (other.name, row, dataset.name, dataset.keys[key])
        for other in held_out
        for key, row in other.keys.items()
        for dataset in train
        if key in dataset.keys
    ]


def _preview(dataset: Any, encoder: PromptEncoder, name: str, num_shown: int) -> DatasetPreview:
    has_tokenizer = not isinstance(encoder.tokenizer, NoTokenizer)
    preview = DatasetPreview(name, unit="tokens" if has_tokenizer else "characters")
    preview.limit = encoder.max_prompt_length if has_tokenizer else None
    preview.overlong = encoder.overlong_prompts
    unread: list[str] = []
    rows, form = dataset, None
    if isinstance(dataset, str | Mapping) and is_gym(dataset):
        rows, form = gym_rows(dataset)
    elif isinstance(dataset, str | Path):
        rows = read_path(Path(dataset), unread)
    preview.refused += [(None, why) for why in unread]
    if is_stream(rows):
        rows = list(islice(rows() if callable(rows) else iter(rows), STREAM_ROWS))
        preview.note = f"a stream; its first {len(rows)} rows"
    held = rows_of(rows)
    preview.num_rows = len(held)
    if not len(held):
        preview.refused.append((None, "the dataset is empty; give at least one row with a `prompt`"))
        return preview
    reader = Reader(encoder)
    reader.look_at(held.column_names, held.row(0), "row 0", form)
    check_column_names(reader.names(held.column_names), "the dataset", needs_prompt=encoder.needs_prompts)
    preview.note = "; ".join(filter(None, (preview.note, reader.note)))
    kinds: dict[str, Counter[str]] = {column: Counter() for column in reader.names(held.column_names)}
    examples: Mapping[str, Any] = {}
    rows_left = _usable_rows(held, reader, encoder, preview, kinds)
    while chunk := list(islice(rows_left, _CHUNK)):
        examples = examples or chunk[0][1]
        _measure(chunk, encoder, preview, num_shown)
    preview.columns = {name: (dict(counts), shorten(examples.get(name), 60)) for name, counts in kinds.items()}
    preview.refused.sort(key=lambda refusal: -1 if refusal[0] is None else refusal[0])
    return preview


def _usable_rows(
    held: Any, reader: Reader, encoder: PromptEncoder, found: DatasetPreview, kinds: dict[str, Counter[str]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows that can be read, after reading; note why the others cannot, and count the types of values."""
    first: PromptKind | None = None
    for index in range(len(held)):
        try:
            row = held.row(index)
            if isinstance(held, SequenceRows):
                row_columns(row, index, held.column_names)
            row = reader.row(row, index)
            check_media(row, index)
            for column, counts in kinds.items():
                value = row.get(column)
                counts["null" if value is None else type(value).__name__] += 1
            if PROMPT_COLUMN in row:
                kind = encoder.kind(row[PROMPT_COLUMN], index)
                first = first or kind
                if kind != first:
                    raise DataError(f"row {index}: the prompt is {kind}, but those before are {first}; give all as one")
        except DataError as error:
            found.refused.append((index, str(error)))
            continue
        yield index, row


def _measure(
    chunk: Sequence[tuple[int, Mapping[str, Any]]], encoder: PromptEncoder, found: DatasetPreview, num_shown: int
) -> None:
    """Tokenise prompts, and note lengths, duplicates and what is too long or cannot be tokenised."""
    for (index, row), ids in zip(chunk, _encoded(chunk, encoder, found), strict=True):
        if ids is None:
            continue
        prompt = row.get(PROMPT_COLUMN, encoder.bare_prompt)
        key = digest(json.dumps(prompt, sort_keys=True, default=str).encode())
        if key in found.keys:
            found.duplicates.append((index, found.keys[key]))
        found.keys.setdefault(key, index)
        found.lengths.append(len(ids))
        if found.limit is not None and len(ids) > found.limit:
            found.too_long.append(index)
        if len(found.shown) < num_shown:
            text = ids if isinstance(ids, str) else encoder.tokenizer.decode(ids)
            columns = {name: value for name, value in row.items() if name != PROMPT_COLUMN}
            found.shown.append(ShownPrompt(index, text, len(ids), columns))


def _encoded(
    chunk: Sequence[tuple[int, Mapping[str, Any]]], encoder: PromptEncoder, found: DatasetPreview
) -> list[list[int] | str | None]:
    """Return the ids of each prompt, None for one that is refused; its text if there is no tokenizer."""
    prompts = [row.get(PROMPT_COLUMN, encoder.bare_prompt) for _, row in chunk]
    if isinstance(encoder.tokenizer, NoTokenizer):
        return [_text(prompt, index, found) for prompt, (index, _) in zip(prompts, chunk, strict=True)]
    indices, rows = zip(*chunk, strict=True)
    try:
        return list(encoder.encode(prompts, indices, columns=rows))
    except DataError:
        pass
    ids: list[list[int] | str | None] = []
    for prompt, index, row in zip(prompts, indices, rows, strict=True):
        try:
            ids.append(encoder.encode([prompt], [index], columns=[row])[0])
        except DataError as error:
            found.refused.append((index, str(error)))
            ids.append(None)
    return ids


def _text(prompt: Any, index: int, found: DatasetPreview) -> str | None:
    """Return a prompt as text, None for one that no tokenizer takes."""
    text = _transcript(prompt)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found.refused.append(
            (index, f"row {index}: the prompt has half a character, {text[error.start]!r}; correct the row")
        )
        return None
    return text


def _transcript(prompt: Any) -> str:
    """Return a prompt as text: messages one after the other, with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"[{message.get('role')}] {message.get('content') or ''}" for message in prompt)


def _name_of(dataset: Any) -> str:
    if isinstance(dataset, str | Path):
        return str(dataset)
    if isinstance(dataset, Mapping):
        return ":".join(map(str, next(iter(dataset.items()), ())))
    return f"a {type(dataset).__name__}"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
