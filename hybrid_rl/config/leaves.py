"""The keys that exist under a choice of section classes."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.algos.options import field_types, place
from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.schema import TrainerConfig

OF_ONE_CHOICE = "options that only the chosen one has"


@dataclass(frozen=True)
class Leaf:
    """One visible key. within: the key that is a mapping of which this is an entry; None if it is a key by itself."""

    path: str
    type: Any
    default: Any
    doc: str
    metadata: Mapping[str, Any]
    within: Leaf | None = None

    @property
    def key(self) -> Leaf:
        """The key that this is, or is an entry of."""
        return self.within or self

    @property
    def name(self) -> str:
        """The short name: the last part of a key's path, and for an entry that of its key as well, `ray.env_vars`."""
        return self.path.removeprefix(f"{self.key.path.rpartition('.')[0]}.")


def visible_leaves(tags: Mapping[str, str] | None = None) -> dict[str, Leaf]:
    """Return all keys that exist under these tags (section -> chosen member; otherwise the default one), by path; the
    entries of one that is a mapping with fixed names stand for it."""
    chosen = members({}, dict(tags or {}))
    return {leaf.path: leaf for leaf in _leaves(TrainerConfig, "", chosen)}


@functools.cache
def leaf_names() -> frozenset[str]:
    """Return the leaf names of all keys, under any tags."""
    return frozenset(leaf.key.name for leaf in all_leaves())


@functools.cache
def all_leaves() -> tuple[Leaf, ...]:
    """Return all keys, and entries of keys, that exist under any tags, each once."""
    seen = [visible_leaves({section: member}) for section, choice in CHOICES.items() for member in choice.members]
    return tuple({path: leaf for leaves in reversed(seen) for path, leaf in leaves.items()}.values())


def _leaves(cls: type, prefix: str, tags: Mapping[str, str], within: Leaf | None = None) -> Iterator[Leaf]:
    for item, path, kind in fields_of(cls, prefix, tags):
        if dataclasses.is_dataclass(kind):
            is_key = "doc" in item.metadata
            mapping = Leaf(path, dict[str, Any], {}, item.metadata["doc"], item.metadata) if is_key else within
            yield from _leaves(typing.cast(type, kind), path + ".", tags, mapping)
        else:
            default = item.default_factory() if callable(item.default_factory) else item.default
            name = item.metadata["within"]
            mapping = Leaf(f"{prefix}{name}", dict[str, Any], {}, OF_ONE_CHOICE, item.metadata) if name else within
            yield Leaf(path, kind, default, item.metadata["doc"], item.metadata, mapping)


def fields_of(cls: type, prefix: str, tags: Mapping[str, str]) -> Iterator[tuple[dataclasses.Field[Any], str, Any]]:
    """Return the fields of a section with their paths, and their types under these tags."""
    hints = field_types(cls)
    for item in dataclasses.fields(cls):
        path = prefix + place(item)
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
    values: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            values |= by_path([value], f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values
