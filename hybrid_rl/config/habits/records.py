"""The form in which keys of other libraries are written down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

Kind = Literal["same", "other name", "not needed", "missing"]


@dataclass(frozen=True)
class Habit:
    """A key of another library, and what stands for it here.

    library: where it comes from. name: as written there, with its path if it has one; `section.*` stands for all keys
    of a section. kind: same = the same name and meaning here; other name = `here` says what to set; not needed = this
    library does so by itself; missing = not there. here: the key to set, perhaps with its value, or several; empty for
    the last two kinds. note: what else to know, in one sentence.
    """

    library: str
    name: str
    kind: Kind
    here: str = ""
    note: str = ""

    @property
    def advice(self) -> str:
        """What to do, as an error says it."""
        if self.here:
            return f"set {self.here}" + (f": {self.note}" if self.note else "")
        return f"leave it out: {self.note}" if self.kind == "not needed" else self.note


def records(
    library: str,
    *,
    same: str = "",
    other_name: Mapping[str, str | tuple[str, str]] | None = None,
    not_needed: Mapping[str, str] | None = None,
    missing: Mapping[str, str] | None = None,
) -> Iterator[Habit]:
    """Make records. Names that share an entry stand in one text; what is set may come with a note."""
    for name in same.split():
        yield Habit(library, name, "same", name.rpartition(".")[2])
    for names, given in (other_name or {}).items():
        here, note = (given, "") if isinstance(given, str) else given
        yield from (Habit(library, name, "other name", here, note) for name in names.split())
    for names, note in (not_needed or {}).items():
        yield from (Habit(library, name, "not needed", note=note) for name in names.split())
    for names, note in (missing or {}).items():
        yield from (Habit(library, name, "missing", note=note) for name in names.split())


@dataclass(frozen=True)
class Answer:
    """What becomes of a setting. settings: keys here, with values; empty: there is nothing to set. note: why, or what
    else to know."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def advice(self) -> str:
        """What to do, as an error says it."""
        todo = " ".join(said(key, value) for key, value in self.settings.items())
        return f"{f'set {todo}' if todo else 'leave it out'}" + (f": {self.note}" if self.note else "")


def said(key: str, value: Any) -> str:
    """Return `key=value` as the command line takes it, without a shell's quotes."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"{key}={value}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return f"{key}={text.removesuffix('...' + chr(10)).strip()}"
