"""Rows of a dataset: random access to any container or file that holds one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.data.prompts import PROMPT_COLUMN, check_column_names, shorten
from hybrid_rl.errors import DataError

CHUNK_ROWS = 4096


class SequenceRows:
    """Rows of a list, or of any object with a length and an index."""

    def __init__(self, rows: Any, *, needs_prompt: bool = True) -> None:
        self._rows = list(rows) if isinstance(rows, list | tuple) else rows
        self.column_names: tuple[str, ...] = ()
        if len(self._rows):
            self.column_names = row_columns(self._rows[0], 0, None, needs_prompt=needs_prompt)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]

    def prompts(self, start: int, stop: int) -> list[Any]:
        found, names = [], set(self.column_names)
        for index in range(start, stop):
            row = self._rows[index]
            if type(row) is not dict or row.keys() != names:
                row_columns(row, index, self.column_names)
            found.append(row.get(PROMPT_COLUMN))
        return found

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row."""
        rows = (self._rows[index] for index in range(len(self)))
        return (row.get(name) if isinstance(row, Mapping) else None for row in rows)  # `prompts` refuses such rows


class HubRows:
    """Rows of a `datasets.Dataset`."""

    def __init__(self, dataset: Any, *, needs_prompt: bool = True) -> None:
        self._dataset = dataset
        self.column_names: tuple[str, ...] = tuple(dataset.column_names)
        self._prompts: Any = None
        if len(dataset):
            check_column_names(self.column_names, "the dataset", needs_prompt=needs_prompt)
        if len(dataset) and PROMPT_COLUMN in self.column_names:
            # Without the other columns (images, say), and without the user's tensor format, which makes arrays of
            # messages.
            self._prompts = dataset.select_columns([PROMPT_COLUMN]).with_format(None)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Mapping[str, Any]:
        return self._dataset[index] if self._prompts is None else {**self._dataset[index], **self._prompts[index]}

    def prompts(self, start: int, stop: int) -> list[Any]:
        if self._prompts is None:
            return [None] * (stop - start)
        return list(self._prompts[start:stop][PROMPT_COLUMN])

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row."""
        tables = self._dataset.select_columns([name]).with_format("arrow")
        for start in range(0, len(self), CHUNK_ROWS):
            yield from map(_python, tables[start : start + CHUNK_ROWS].column(name))


class ArrowRows:
    """Rows of a `pyarrow.Table`."""

    def __init__(self, table: Any, *, needs_prompt: bool = True) -> None:
        self._table = table
        self.column_names: tuple[str, ...] = tuple(table.column_names)
        if table.num_rows:
            check_column_names(self.column_names, "the table", needs_prompt=needs_prompt)

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Mapping[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]

    def prompts(self, start: int, stop: int) -> list[Any]:
        if PROMPT_COLUMN not in self.column_names:
            return [None] * (stop - start)
        return self._table.column(PROMPT_COLUMN).slice(start, stop - start).to_pylist()

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row."""
        return map(_python, self._table.column(name))


Rows = SequenceRows | HubRows | ArrowRows
"""Random access to the rows of a dataset. `prompts` reads only that column, None for each row if there is none;
`values` yields one column, row by row, without decoding any other."""


def _python(scalar: Any) -> Any:
    return scalar.as_py()


def frame_table(frame: Any) -> Any:
    """Return the Arrow table of a pandas.DataFrame, without its index. Raises DataError if it cannot be read."""
    import pyarrow

    try:
        return pyarrow.Table.from_pandas(frame, preserve_index=False)
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"the pandas.DataFrame cannot be read: {error}; pass frame.to_dict('records')") from error


def read_path(path: Path) -> Any:
    """Read the rows of a dataset file or saved folder. Raises DataError if it is missing, unknown or damaged."""
    if not path.exists():
        raise DataError(
            f"the dataset {str(path)!r} is neither a file nor a folder; correct the path. For a dataset on a hub "
            "pass datasets.load_dataset(...)"
        )
    if path.is_dir():
        return _read_folder(path)
    if path.suffix in (".jsonl", ".json"):
        return _read_json_lines(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(f"the dataset file {str(path)!r} ends in {path.suffix!r}; use .jsonl, .json or .parquet")


def _read_folder(path: Path) -> Any:
    if not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        raise DataError(
            f"the folder {str(path)!r} was not saved by datasets' save_to_disk (it has no state.json); pass such a "
            "folder or a .jsonl or .parquet file"
        )
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:  # half-written folders fail in many ways
        raise DataError(f"the folder {str(path)!r} cannot be read: {error}; save the dataset again") from error


def _read_json_lines(path: Path) -> list[Any]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                # A byte order mark is allowed only at the start.
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:  # bad UTF-8 and bad JSON
                hint = " (a JSON array? write one object per line)" if line.lstrip()[:1] == b"[" else ""
                raise DataError(f"{path}, line {number}: not valid JSON: {error}{hint}; correct the line") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: {shorten(row)} is not an object; write one object per line")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"the parquet file {str(path)!r} cannot be read: {error}; write it again") from error


def row_columns(
    row: Any, index: int, expected: tuple[str, ...] | None, *, needs_prompt: bool = True
) -> tuple[str, ...]:
    """Return a row's column names. Raises DataError unless it is a dict with the `expected` ones (None = first row)."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"row {index}: {shorten(row)} is of type {type(row).__name__}; every row must be a dict with a `prompt`"
        )
    if expected is None:
        check_column_names(list(row), f"row {index}", needs_prompt=needs_prompt)
    elif len(row) != len(expected) or any(name not in row for name in expected):
        missing = [name for name in expected if name not in row]
        extra = [name for name in row if name not in expected]
        raise DataError(
            f"row {index}: its columns differ from those of row 0 (missing: {missing}, extra: {extra}); give every "
            "row the same columns, with None where there is no value"
        )
    return tuple(row)


def is_instance(value: Any, module: str, name: str) -> bool:
    """Like isinstance, without importing the library: an object of it can exist only if the library is loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))
