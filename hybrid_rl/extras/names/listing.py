"""Keys as a reader needs them: by section, with the values that each takes, what it depends on, and its names in
other libraries."""

from __future__ import annotations

import inspect
import re
import types
import typing
from dataclasses import dataclass, replace
from typing import Any, Literal

from hybrid_rl.algos.options import field_types
from hybrid_rl.config.choices import CHOICES, Choice
from hybrid_rl.config.load import Leaf, visible_leaves
from hybrid_rl.config.schema import TrainerConfig
from hybrid_rl.extras.names import records

# When keys of a section without a tag exist.
CONDITIONS = {
    "model": "with dtype=bfloat16",
    "critic": "with an advantage that has a critic: gae, vapo, vtrace",
    "entropy": "with entropy_target",
    "eval": "with eval_temperature above 0",
    "lora": "with lora.r",
    "buffer": "with partial or async_level",
}
# Of sections whose class is a choice: the doc of one member would say too little.
TITLES = {
    "algorithm": "The algorithm: a preset by name, and what all algorithms have.",
    "advantage": "The advantage estimator.",
    "policy_loss": "The policy loss.",
    "kl": "The KL penalty against the reference model.",
    "correction": "Correction of the gap between engine and trainer.",
    "critic": "The critic.",
    "entropy": "The entropy bonus over a run.",
    "rollout": "Generation.",
    "controller": "The processes in which the workers run.",
}
KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
# What is to be set instead of a foreign key, if that is one key.
INSTEAD = re.compile(r"(?:\w+\.)*(\w+)(?!.*(?:, | and ))")
SAME_NAME = "the same"


@dataclass(frozen=True)
class Key:
    """A key of the configuration. section: "" for those of the run; values: what it takes, in words; when: the choice
    on which it depends, empty if it always exists; elsewhere: its names in other libraries,
    a text such as "verl: actor.optim.lr" for each; entries: of one that is a mapping with fixed names."""

    path: str
    section: str
    values: str
    default: str
    doc: str
    when: str = ""
    elsewhere: tuple[str, ...] = ()
    entries: tuple[Key, ...] = ()

    @property
    def name(self) -> str:
        """The leaf name, which may be used instead of the path."""
        return self.path.rpartition(".")[2]


def all_keys() -> list[Key]:
    """Return every key, by section; in a section those that always exist come first."""
    foreign = _foreign_names()
    keys_by_section: dict[str, list[Key]] = {section: [] for section in ("", *_sections())}
    leaves: dict[str, list[Leaf]] = {section: [] for section in keys_by_section if section not in CHOICES}
    for path, leaf in visible_leaves().items():
        section = path.partition(".")[0] if "." in path else ""
        leaves.get(section, []).append(leaf)
    for section, of_section in leaves.items():
        keys_by_section[section] = _gathered([(leaf, _key(leaf, section, "", foreign)) for leaf in of_section])
    for section, choice in CHOICES.items():
        keys_by_section[section] = _of_choice(section, choice, foreign)
    return [key for keys in keys_by_section.values() for key in keys]


def section_title(section: str) -> str:
    """Return what the keys of a section are about: the first sentence of its class."""
    if not section:
        return "The run as a whole."
    kind = next(iter(CHOICES[section].members.values())) if section in CHOICES else field_types(TrainerConfig)[section]
    doc = " ".join((inspect.getdoc(kind) or "").split())
    return TITLES.get(section) or re.split(r"(?<=\.)\s", doc)[0]


def _sections() -> list[str]:
    return [name for name, kind in field_types(TrainerConfig).items() if name in CHOICES or isinstance(kind, type)]


def _of_choice(section: str, choice: Choice, foreign: dict[str, list[str]]) -> list[Key]:
    """Return the keys of a section under every member: common ones, then those that only some members have."""
    start = f"{section}."
    owners: dict[str, dict[str, Leaf]] = {}
    for member in choice.members:
        for path, leaf in visible_leaves({section: member}).items():
            if path.startswith(start):
                owners.setdefault(path, {})[member] = leaf
    leaves = {path: _joined(section, choice, of_members) for path, of_members in owners.items()}
    keys = []
    for path, leaf in leaves.items():
        is_common = len(owners[path]) == len(choice.members)
        when = "" if is_common else _condition(section, choice, [*owners[path]])
        if choice.tag is not None and path == f"{start}{choice.tag}":
            keys.append(_key(leaf, section, "", foreign, "one of " + ", ".join(choice.members)))
        else:
            keys.append(_key(leaf, section, when, foreign))
    gathered = _gathered(list(zip(leaves.values(), keys, strict=True)))
    order = {when: place for place, when in enumerate(dict.fromkeys(["", *(key.when for key in gathered)]))}
    return sorted(gathered, key=lambda key: order[key.when])


def _joined(section: str, choice: Choice, of_members: dict[str, Leaf]) -> Leaf:
    """Return one leaf for those of several members: the first, with all words if they take different ones."""
    # A member may have a key only to refuse all values but one.
    leaves = {member: leaf for member, leaf in of_members.items() if not _is_fixed(leaf)} or of_members
    first = next(iter(leaves.values()))
    by_kind: dict[Any, list[str]] = {}
    for member, leaf in leaves.items():
        by_kind.setdefault(leaf.type, []).append(member)
    is_tag = first.path == f"{section}.{choice.tag}"
    if is_tag or len(by_kind) == 1 or any(typing.get_origin(kind) is not Literal for kind in by_kind):
        return first
    words = tuple(dict.fromkeys(word for kind in by_kind for word in typing.get_args(kind)))
    docs = [
        f"{_condition(section, choice, members)} ({', '.join(typing.get_args(kind))}): {leaves[members[0]].doc}"
        for kind, members in by_kind.items()
    ]
    return replace(first, type=Literal[words], doc="; ".join(docs))


def _gathered(keys: list[tuple[Leaf, Key]]) -> list[Key]:
    """Return these keys, with entries of a mapping as parts of it. It depends on what all of its entries depend on."""
    by_path: dict[str, list[tuple[Leaf, Key]]] = {}
    for leaf, key in keys:
        by_path.setdefault(leaf.key.path, []).append((leaf, key))
    gathered = []
    for (leaf, key), *others in by_path.values():
        if leaf.within is None:
            gathered.append(key)
            continue
        entries = [key, *(entry for _, entry in others)]
        conditions = {entry.when for entry in entries}
        when = key.when if len(conditions) == 1 else ""
        parts = tuple(replace(entry, when="" if when else entry.when) for entry in entries)
        mapping = Key(leaf.within.path, key.section, "mapping", "{}", leaf.within.doc, when, entries=parts)
        gathered.append(mapping)
    return gathered


def _is_fixed(leaf: Leaf) -> bool:
    return leaf.metadata["minimum"] is not None and leaf.metadata["minimum"] == leaf.metadata["maximum"]


def _condition(section: str, choice: Choice, members: list[str]) -> str:
    if choice.tag is None:
        return CONDITIONS.get(section, f"{section}: {', '.join(members)}")
    others = [member for member in choice.members if member not in members]
    if len(others) < len(members) and len(others) <= 2:
        return f"unless {section}={' or '.join(others)}"
    return f"with {section}={' or '.join(members)}"


def _key(leaf: Leaf, section: str, when: str, foreign: dict[str, list[str]], values: str = "") -> Key:
    name = leaf.path.rpartition(".")[2]
    shown = str(leaf.default).lower() if isinstance(leaf.default, bool) else str(leaf.default)
    elsewhere = tuple(foreign.get(name, ()))
    return Key(leaf.path, section, values or _values(leaf), shown, leaf.doc, when, elsewhere)


def _values(leaf: Leaf) -> str:
    words = _words(leaf.type)
    bounds = [
        f"{word} {leaf.metadata[bound]}"
        for bound, word in (("minimum", "at least"), ("above", "above"), ("maximum", "at most"), ("below", "below"))
        if leaf.metadata.get(bound) is not None and abs(leaf.metadata[bound]) < 1e6
    ]
    return f"{words}, {', '.join(bounds)}" if bounds else words


def _words(kind: Any) -> str:
    """Say which values a type takes. None, which some keys take as well, is explained by their docs."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(option) for option in options if option is not type(None))
    if origin is Literal:
        return f"one of {', '.join(map(str, options))}" if len(options) > 1 else str(options[0])
    if origin is list:
        return f"list of: {_words(options[0])}" if options else "list"
    if origin is dict:
        return "mapping"
    return KINDS.get(kind, getattr(kind, "__name__", str(kind)))


def _foreign_names() -> dict[str, list[str]]:
    """Return a key's names in other libraries, a text for each library, by the leaf name that it has here."""
    names_by_key: dict[str, dict[str, list[str]]] = {}
    for habit in records():
        instead = INSTEAD.match(habit.here)
        if instead is not None:
            shown = SAME_NAME if habit.name == instead[1] else habit.name
            names_by_key.setdefault(instead[1], {}).setdefault(habit.library, []).append(shown)
    return {
        name: [f"{library}: {', '.join(names)}" for library, names in libraries.items()]
        for name, libraries in names_by_key.items()
    }
