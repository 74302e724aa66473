"""A configuration as text: what differs from the defaults; all keys with their values, for other views."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from hybrid_rl.algos.options import place
from hybrid_rl.process.hooks import extra

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
        return extra("config_html")(self)


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
            yield KeyValue(f"{prefix}{place(item)}", value, default, item.metadata.get("doc", ""))


def short(value: Any) -> str:
    """Write a value down in at most so many characters."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."
