"""All that is wrong with a configuration, as one error."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator

from hybrid_rl.errors import ConfigError

KEY_WIDTH = 34
TEXT_WIDTH = 62


class Problems:
    """What was found so far, by key: the first sentence about a key counts."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def add(self, key: str, sentence: str) -> None:
        """Note a sentence about a key."""
        self._found.setdefault(key, sentence)

    @contextlib.contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Note the ConfigError that the block raises."""
        try:
            yield
        except ConfigError as error:
            self.add(key, str(error))

    def check(self, after: str = "") -> None:
        """Raise ConfigError if anything was found: a sentence as it is, several as a table, with `after` at its end."""
        if len(self._found) == 1:
            raise ConfigError(next(iter(self._found.values())))
        if self._found:
            rows = "\n".join(_row(key, sentence) for key, sentence in self._found.items())
            raise ConfigError(f"{len(self._found)} keys cannot be used as they are:\n{rows}{after}")


def _row(key: str, sentence: str) -> str:
    """Return lines of a table: the key, and what to do about it."""
    for start in (f"unknown key {key!r}", f"key {key!r} ", f"{key}="):
        sentence = sentence.removeprefix(start)
    sentence = f"no such key{sentence}" if sentence.startswith((" (", "; did")) else sentence
    lines = textwrap.wrap(sentence.lstrip(":; "), TEXT_WIDTH, break_long_words=False, break_on_hyphens=False)
    indent = " " * (KEY_WIDTH + 4)
    first, rest = (lines or [""])[0], [indent + line for line in lines[1:]]
    if len(key) > KEY_WIDTH:
        return "\n".join([f"  {key}", indent + first, *rest])
    return "\n".join([f"  {key:<{KEY_WIDTH}}  {first}", *rest])
