"""A configuration as text and as HTML: what differs from the defaults first, the rest folded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from hybrid_rl.batch.html import cell, code, escaped, folded, page_part, table

MAX_VALUE = 80  # characters of a value in a line


class KeyValue(NamedTuple):
    """A key of a configuration. path: as in YAML, `optimizer.learning_rate`."""

    path: str
    value: Any
    default: Any
    doc: str

    @property
    def differs(self) -> bool:
        """Whether the value is not the default."""
        return bool(self.value != self.default)


class Shown:
    """The base of a configuration that shows itself."""

    def __repr__(self) -> str:
        keys = list(key_values(self))
        changed = [key for key in keys if key.differs]
        width = max((len(key.path) for key in changed), default=0)
        lines = [f"  {key.path:{width}}  {short(key.value)}" for key in changed]
        rest = f"{len(keys) - len(changed)} other keys have their defaults"
        return "\n".join([f"{type(self).__name__}: {rest}", *lines])

    def _repr_html_(self) -> str:
        keys = list(key_values(self))
        sections: dict[str, list[KeyValue]] = {}
        for key in keys:
            sections.setdefault(key.path.rpartition(".")[0] or "run", []).append(key)
        rest = "".join(folded(f"{name} ({len(keys)})", _rows(keys)) for name, keys in sections.items())
        return page_part(changed_html(self), folded(f"all {len(keys)} keys, by section", rest))


def changed_html(config: Shown) -> str:
    """Return the keys of a configuration that differ from their defaults."""
    changed = [key for key in key_values(config) if key.differs]
    if not changed:
        return "<b>all keys have their defaults</b>"
    return page_part(f"<b>{len(changed)} keys differ from their defaults</b>", _rows(changed))


def key_values(config: Any, prefix: str = "", usual: Any = None) -> Iterator[KeyValue]:
    """Yield all keys of a configuration in order. usual: the section with its defaults; of keys that it does not have
    the defaults are those of their own section."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        default = item.default_factory() if callable(item.default_factory) else item.default
        if usual is not None and hasattr(usual, item.name):
            default = getattr(usual, item.name)
        if dataclasses.is_dataclass(value):
            yield from key_values(value, f"{prefix}{item.name}.", default)
        else:
            yield KeyValue(f"{prefix}{item.name}", value, default, item.metadata.get("doc", ""))


def short(value: Any) -> str:
    """Write a value down in at most so many characters."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def _rows(keys: list[KeyValue]) -> str:
    return table(
        ("key", "value", "default", "meaning"),
        (
            cell(code(key.path))
            + cell(f"{'<b>' * key.differs}{escaped(short(key.value))}{'</b>' * key.differs}")
            + cell(escaped(short(key.default)) if key.differs else "")
            + cell(escaped(key.doc))
            for key in keys
        ),
    )
