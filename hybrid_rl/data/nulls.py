"""Nulls that Arrow adds to what a chat template shows.

A column of Arrow has one type for all rows, so that an object gets the keys of all others, with null: the call `f(a=1)`
of one row becomes `f(a=1, city=None)` beside `g(city="Brno")` of another. In what templates show (messages, and the
columns `tools` and `chat_template_kwargs`) such keys are left out again, at any depth. A null of Arrow does not say
whether the key was there before, and an absent argument is far more common than one that is null. What never was in a
struct of Arrow (lists, JSON lines, the type Json of `datasets`) keeps its nulls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hybrid_rl.data.rendering import TEMPLATE_COLUMNS


class NullCleaner:
    """Leaves added nulls out of rows.

    Attributes:
        columns: those with something that templates show; empty if the types are unknown.
    """

    def __init__(self, schema: Any) -> None:
        """schema: of Arrow, None = unknown: then every null in what a template shows counts as added."""
        self._is_typed = schema is not None
        self._cleaners = {field.name: _cleaner(field.type) for field in schema or () if _is_shown(field)}
        self.columns = tuple(self._cleaners)

    def row(self, row: Any) -> Any:
        """Return a row without added nulls."""
        if not isinstance(row, Mapping) or (self._is_typed and not self.columns):
            return row
        return {name: self.value(name, value) for name, value in row.items()}

    def value(self, name: str, value: Any) -> Any:
        """Return a value of a column without added nulls."""
        is_for_template = name in TEMPLATE_COLUMNS
        if self._is_typed:
            clean = self._cleaners.get(name)
        else:
            clean = _without_nulls if is_for_template or _is_conversation(value) else None
        if clean is None or value is None:
            return value
        cleaned = clean(value)
        # A message always has its content, None beside tool calls.
        return cleaned if is_for_template else [{**message, "content": message.get("content")} for message in cleaned]


def _is_shown(field: Any) -> bool:
    """Whether a column of Arrow has messages, or something else that a template shows."""
    item: Any = getattr(field.type, "value_type", None)
    return field.name in TEMPLATE_COLUMNS or _is_message({part.name for part in item} if _is_object(item) else ())


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, Mapping) and _is_message(message) for message in value)


def _is_message(keys: Collection[str]) -> bool:
    return "role" in keys and ("content" in keys or "tool_calls" in keys)


def _is_object(kind: Any) -> bool:
    import pyarrow

    return kind is not None and bool(pyarrow.types.is_struct(kind))


def _cleaner(kind: Any) -> Callable[[Any], Any]:
    """Return the function that leaves added nulls out of a value of this type of Arrow."""
    if _is_object(kind):
        parts = {field.name: _cleaner(field.type) for field in kind}
        return lambda value: (
            {name: parts.get(name, _as_it_is)(part) for name, part in value.items() if part is not None}
            if isinstance(value, Mapping)
            else value
        )
    if hasattr(kind, "key_type"):  # a map: its keys are the row's own, and Arrow gives pairs
        return lambda value: dict(value) if isinstance(value, list) else value
    if hasattr(kind, "value_type"):
        clean = _cleaner(kind.value_type)
        return lambda value: [clean(part) for part in value] if isinstance(value, list) else value
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
