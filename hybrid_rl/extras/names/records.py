"""Keys of other libraries, as they are written down in YAML files."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from hybrid_rl.process.files import read_yaml

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


def read_records(file: str) -> Iterator[Habit]:
    """Yield the records of a library, from the YAML file of that name in this folder.

    `library` says where they come from; below each kind stand names, with what to set, or a note, or a list of both.
    """
    content = read_table(file)
    library = content["library"]
    yield from (Habit(library, name, "same", name.rpartition(".")[2]) for name in content.get("same", ()))
    for name, entry in content.get("other name", {}).items():
        here, note = (entry, "") if isinstance(entry, str) else entry
        yield Habit(library, name, "other name", here, note)
    yield from (Habit(library, name, "not needed", note=note) for name, note in content.get("not needed", {}).items())
    yield from (Habit(library, name, "missing", note=note) for name, note in content.get("missing", {}).items())


@functools.cache
def read_table(file: str) -> dict[str, Any]:
    """Return the content of the YAML file of that name in this folder."""
    return read_yaml(Path(__file__).with_name(f"{file}.yaml"))


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
