"""The keys that exist under a choice of section classes."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.schema import TrainerConfig
from hybrid_rl.options import field_types


@dataclass(frozen=True)
class Leaf:
    """One visible key."""

    path: str
    type: Any
    default: Any
    doc: str
    metadata: Mapping[str, Any]


def visible_leaves(tags: Mapping[str, str] | None = None) -> dict[str, Leaf]:
    """Return all keys that exist under these tags (section -> chosen member; otherwise the default one), by path."""
    chosen = members({}, dict(tags or {}))
    return {leaf.path: leaf for leaf in _leaves(TrainerConfig, "", chosen)}


@functools.cache
def leaf_names() -> frozenset[str]:
    """Return the leaf names of all keys, under any tags."""
    return frozenset(leaf.path.rpartition(".")[2] for leaf in all_leaves())


@functools.cache
def all_leaves() -> tuple[Leaf, ...]:
    """Return all keys that exist under any tags, each once."""
    choices = [{section: member} for section, choice in CHOICES.items() for member in choice.members]
    found: dict[str, Leaf] = {}
    for tags in choices:
        found = visible_leaves(tags) | found
    return tuple(found.values())


def _leaves(cls: type, prefix: str, tags: Mapping[str, str]) -> Iterator[Leaf]:
    for item, path, kind in fields_of(cls, prefix, tags):
        if dataclasses.is_dataclass(kind):
            yield from _leaves(typing.cast(type, kind), path + ".", tags)
        else:
            default = item.default_factory() if callable(item.default_factory) else item.default
            yield Leaf(path, kind, default, item.metadata["doc"], item.metadata)


def fields_of(cls: type, prefix: str, tags: Mapping[str, str]) -> Iterator[tuple[dataclasses.Field[Any], str, Any]]:
    """Return the fields of a section with their paths, and their types under these tags."""
    hints = field_types(cls)
    for item in dataclasses.fields(cls):
        path = prefix + item.name
        yield item, path, CHOICES[path].members[tags[path]] if path in CHOICES else hints[item.name]


def members(given: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, str]:
    """Return the member of every choice: as named, else as what is given implies, else the default."""
    tags: dict[str, str] = {}
    for section, choice in CHOICES.items():
        inferred = None if section in named else choice.infer(given, tags)
        tags[section] = named.get(section, inferred or choice.default)
    return tags


def by_path(layers: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, Any]:
    """Return the values of layers by their dotted paths; the last one wins."""
    found: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            found |= by_path([value], f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
