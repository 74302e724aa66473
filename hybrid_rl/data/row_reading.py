"""Reading of rows: which column is the prompt, what answers are made of, and how prompts become messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hybrid_rl.data.formats import ANSWER_COLUMN, Format, hint, recognise
from hybrid_rl.data.prompts import PROMPT_COLUMN, PromptEncoder, check_reserved_columns
from hybrid_rl.data.rendering import TEMPLATE_COLUMNS
from hybrid_rl.data.rows import CHUNK_ROWS, Rows
from hybrid_rl.errors import DataError


class Reader:
    """Turns rows as a dataset has them into rows with a `prompt`, and with an `answer` if a format says how.

    format: recognised in the first row; None if columns are read as they are.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._column = PROMPT_COLUMN
        self._is_made = False  # whether the prompt is nothing but a system prompt
        self._shown: list[str] = []
        self.format: Format | None = None

    def look_at(self, columns: Iterable[str], first: Mapping[str, Any], where: str, form: Format | None = None) -> None:
        """Decide by columns and the first row how rows are read. where: the dataset in the message; form: if it is
        known.

        Raises DataError if a column that is named does not exist, or if one has to be named."""
        names = tuple(columns)
        column = self._encoder.prompt_column if form is None else None
        self.format = form or (recognise(names, first) if column is None else None)
        self._column = column or (PROMPT_COLUMN if self.format is None else self.format.prompt_column)
        if column is not None and column not in names:
            raise DataError(
                f"{where} has no column {column!r} (data.prompt_column); its columns are {', '.join(map(repr, names))}"
            )
        if self._column not in names and self._encoder.needs_prompts and (advice := hint(names)):
            raise DataError(
                f"{where} has no `prompt` column; its columns are {', '.join(map(repr, names))}. Rename one to "
                f"`prompt`, or {advice}"
            )
        self._is_made = self._column not in names and self._encoder.system_prompt is not None
        check_reserved_columns([] if self.format is None else self.format.made, where)
        unused = self._encoder.unused_columns
        self._shown = [f"`{name}`" for name in TEMPLATE_COLUMNS if name in names and name not in unused]

    @property
    def source(self) -> str:
        """The column with the prompt."""
        return self._column

    @property
    def changes_rows(self) -> bool:
        """Whether rows are read in another way than as they are."""
        return self._encoder.dresses or self._column != PROMPT_COLUMN or self.format is not None

    @property
    def note(self) -> str:
        """How rows are read, in a line; empty if they are taken as they are."""
        form = "" if self.format is None else f"read as {self.format.name}: {self.format.said}"
        shown = f"the chat template gets {' and '.join(self._shown)} of each row" if self._shown else ""
        return "; ".join(filter(None, (form, shown)))

    def names(self, columns: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the columns that rows have after reading."""
        names = tuple(columns)
        has_prompt = self._column in names or self._is_made
        made = () if self.format is None else self.format.made
        return tuple(dict.fromkeys([*([PROMPT_COLUMN] if has_prompt else []), *names, *made]))

    def prompt(self, value: Any, row: int) -> Any:
        """Return a prompt as the model is asked. value: of the prompt's column."""
        if self._is_made:
            value = self._encoder.bare_prompt
        is_question = self.format is not None and self.format.is_question
        return self._encoder.dressed(value, row, is_question=is_question)

    def row(self, row: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        """Return a row after reading; one that lacks a column, which is refused elsewhere, as it is."""
        form = self.format
        if not isinstance(row, Mapping) or (form is not None and form.source not in row):
            return row
        if self._column not in row and not self._is_made:
            return row
        read_row = {**row, PROMPT_COLUMN: self.prompt(row.get(self._column), index)}
        if form is not None:
            read_row[ANSWER_COLUMN] = form.answer(row[form.source], index)
            if form.moved_to is not None:
                read_row[form.moved_to] = row[form.source]
        return read_row


class ReadRows:
    """Rows of a dataset after reading. All answers are made, and so checked, when it is made."""

    def __init__(self, rows: Rows, reader: Reader) -> None:
        self._rows, self._reader = rows, reader
        self.column_names = reader.names(rows.column_names)
        if reader.format is not None:
            for index, value in enumerate(rows.values(reader.format.source)):
                reader.format.answer(value, index)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        return self._reader.row(self._rows.row(index), index)

    def prompts(self, start: int, stop: int, column: str = PROMPT_COLUMN) -> list[Any]:
        if column != PROMPT_COLUMN:
            return self._rows.prompts(start, stop, column)
        values = self._rows.prompts(start, stop, self._reader.source)
        return [self._reader.prompt(value, start + place) for place, value in enumerate(values)]

    def values(self, name: str) -> Iterator[Any]:
        """Yield one column, row by row."""
        form = self._reader.format
        if name == PROMPT_COLUMN:
            starts = range(0, len(self), CHUNK_ROWS)
            return (prompt for start in starts for prompt in self.prompts(start, min(start + CHUNK_ROWS, len(self))))
        if form is not None and name == ANSWER_COLUMN:
            return (form.answer(value, index) for index, value in enumerate(self._rows.values(form.source)))
        return self._rows.values(form.source if form is not None and name == form.moved_to else name)
