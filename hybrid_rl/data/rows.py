"""Rows of a dataset: random access to any container or file that holds one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.data.nulls import NullCleaner
from hybrid_rl.data.prompts import PROMPT_COLUMN, check_plain_names
from hybrid_rl.errors import DataError, shorten

CHUNK_ROWS = 4096
BOM = b"\xef\xbb\xbf"


class SequenceRows:
    """Rows of a list, or of any object with a length and an index. cleaner: of nulls, None = all are the rows' own."""

    def __init__(self, rows: Any, cleaner: NullCleaner | None = None) -> None:
        self._rows = list(rows) if isinstance(rows, list | tuple) else rows
        self._cleaner = cleaner
        self.column_names: tuple[str, ...] = ()
        if len(self._rows):
            self.column_names = row_columns(self._rows[0], 0, None)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._rows[index]
        return row if self._cleaner is None else self._cleaner.row(row)

    def prompts(self, start: int, stop: int, column: str = PROMPT_COLUMN) -> list[Any]:
        prompts, names = [], set(self.column_names)
        for index in range(start, stop):
            row = self.row(index)
            if type(row) is not dict or row.keys() != names:
                row_columns(row, index, self.column_names)
            prompts.append(row.get(column))
        return prompts

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row."""
        rows = (self._rows[index] for index in range(len(self)))
        return (row.get(name) if isinstance(row, Mapping) else None for row in rows)  # `prompts` refuses such rows


class HubRows:
    """Rows of a `datasets.Dataset`, without the nulls that its types add to conversations."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.column_names: tuple[str, ...] = tuple(dataset.column_names)
        self._cleaner = NullCleaner(dataset.features.arrow_schema)
        if len(dataset):
            check_plain_names(self.column_names, "the dataset")
        plain = {PROMPT_COLUMN, *self._cleaner.columns} & {*self.column_names}
        self._shown = self._plain(*plain) if len(dataset) and plain else None

    def _plain(self, *columns: str) -> Any:
        """Some columns, without decoding others (images, say), and without the user's tensor format, which makes arrays
        of messages."""
        return self._dataset.select_columns(list(columns)).with_format(None)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Mapping[str, Any]:
        row = self._dataset[index]
        return row if self._shown is None else {**row, **self._cleaner.row(self._shown[index])}

    def prompts(self, start: int, stop: int, column: str = PROMPT_COLUMN) -> list[Any]:
        if column not in self.column_names:
            return [None] * (stop - start)
        return [self._cleaner.value(column, value) for value in self._plain(column)[start:stop][column]]

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row."""
        tables = self._dataset.select_columns([name]).with_format("arrow")
        for start in range(0, len(self), CHUNK_ROWS):
            yield from map(_python, tables[start : start + CHUNK_ROWS].column(name))


class ArrowRows:
    """Rows of a `pyarrow.Table`, without the nulls that its types add to conversations."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._cleaner = NullCleaner(table.schema)
        self.column_names: tuple[str, ...] = tuple(table.column_names)
        if table.num_rows:
            check_plain_names(self.column_names, "the table")

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._cleaner.row(self._table.slice(index, 1).to_pylist()[0])
        return row

    def prompts(self, start: int, stop: int, column: str = PROMPT_COLUMN) -> list[Any]:
        if column not in self.column_names:
            return [None] * (stop - start)
        values = self._table.column(column).slice(start, stop - start).to_pylist()
        return [self._cleaner.value(column, value) for value in values]

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row."""
        return map(_python, self._table.column(name))


Rows = SequenceRows | HubRows | ArrowRows
"""Random access to the rows of a dataset. `prompts` reads only that column (another one if it is named), None for each
row if there is none; `values` yields one column, row by row, without decoding any other."""


def _python(scalar: Any) -> Any:
    return scalar.as_py()


def frame_table(frame: Any) -> Any:
    """Return the Arrow table of a pandas.DataFrame, without its index. Raises DataError if it cannot be read."""
    import pyarrow

    try:
        return pyarrow.Table.from_pandas(frame, preserve_index=False)
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"the pandas.DataFrame cannot be read: {error}; pass frame.to_dict('records')") from error


def read_path(path: Path, refused: list[str] | None = None) -> Any:
    """Read the rows of a dataset file, of a saved folder, or of a folder of JSON files with one object each.

    refused: takes what is wrong with each line of JSON, instead of an error for the first.
    Raises DataError if the path is missing, unknown or damaged.
    """
    path = Path(os.path.expanduser(path))
    if not path.exists():
        raise DataError(
            f"the dataset {str(path)!r} is neither a file nor a folder; correct the path. For a dataset on a hub "
            "pass datasets.load_dataset(...)"
        )
    if path.is_dir():
        return _read_folder(path, refused)
    if path.suffix in (".jsonl", ".json"):
        return _read_json(path, refused)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise DataError(f"the dataset file {str(path)!r} ends in {path.suffix!r}; use .jsonl, .json or .parquet")


def _read_folder(path: Path, refused: list[str] | None) -> Any:
    if not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        files = [file for file in path.rglob("*.json") if file.is_file()]
        files.sort(key=lambda file: [_by_number(part) for part in file.parts])
        if not files:
            raise DataError(
                f"the folder {str(path)!r} was not saved by datasets' save_to_disk (it has no state.json), and has no "
                ".json files with a row each (as MATH was published); pass such a folder or a .jsonl or .parquet file"
            )
        return _read_files(path, files, refused)
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:  # half-written folders fail in many ways
        raise DataError(f"the folder {str(path)!r} cannot be read: {error}; save the dataset again") from error


def _by_number(name: str) -> tuple[int, int, str]:
    """A key that sorts 2.json before 10.json."""
    stem = name.partition(".")[0]
    return (0, int(stem), name) if stem.isdecimal() else (1, 0, name)


def _read_files(folder: Path, files: list[Path], refused: list[str] | None) -> list[Any]:
    splits = sorted({file.relative_to(folder).parts[0] for file in files} & {"train", "test", "validation", "val"})
    if len(splits) > 1:
        raise DataError(
            f"the folder {str(folder)!r} holds the splits {', '.join(splits)}; give one of them, such as "
            f"{str(folder / splits[-1])!r}"
        )
    rows: list[Any] = []
    for file in files:
        with _collected(refused):
            rows.append(_json_object(file.read_bytes(), str(file)))
    return rows


@contextlib.contextmanager
def _collected(refused: list[str] | None) -> Iterator[None]:
    """Add an error to the list instead of raising it; raise it if there is no list."""
    try:
        yield
    except DataError as error:
        if refused is None:
            raise
        refused.append(str(error))


def _read_json(path: Path, refused: list[str] | None) -> list[Any]:
    """Read JSON lines; of a file that ends in .json also one array of objects, or one object over several lines."""
    if path.suffix == ".json":
        start = path.read_bytes().removeprefix(BOM).lstrip()
        first = start.split(b"\n", 1)[0].strip()
        if first[:1] == b"[" or (first[:1] == b"{" and first[-1:] != b"}"):
            value = _json_value(start, str(path))
            for place, row in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(row, dict):
                    raise DataError(f"{path}, entry {place}: {shorten(row)} is not an object; give one object per row")
            return value if isinstance(value, list) else [value]
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                with _collected(refused):
                    # A byte order mark is allowed only at the start.
                    rows.append(_json_object(line.removeprefix(BOM) if number == 1 else line, f"{path}, line {number}"))
    return rows


def _json_object(content: bytes, where: str) -> Any:
    row = _json_value(content, where)
    if not isinstance(row, dict):
        raise DataError(f"{where}: {shorten(row)} is not an object; write one object per line")
    return row


def _json_value(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        is_wide = content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:4]
        raise DataError(
            f"{where}: not valid JSON: not UTF-8, but {'perhaps UTF-16' if is_wide else 'another encoding'} "
            f"({error.reason} at byte {error.start}); save the file as UTF-8: iconv -f "
            f"{'UTF-16' if is_wide else 'LATIN1'} -t UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        hint = " (a JSON array? write one object per line, or name the file .json)"
        is_array = content.lstrip()[:1] == b"["
        raise DataError(f"{where}: not valid JSON: {error}{hint * is_array}; correct the line") from error


def _read_parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"the parquet file {str(path)!r} cannot be read: {error}; write it again") from error


def row_columns(row: Any, index: int, expected: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return a row's column names. Raises DataError unless it is a dict with the `expected` ones (None = first row)."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"row {index}: {shorten(row)} is of type {type(row).__name__}; every row must be a dict with a `prompt`"
        )
    if expected is None:
        check_plain_names(list(row), f"row {index}")
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
