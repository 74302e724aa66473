"""Answers to keys that do not exist: what they are called here, or why there is no such key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from hybrid_rl.config.choices import CHOICES
from hybrid_rl.config.leaves import Leaf, all_leaves, visible_leaves
from hybrid_rl.process.hooks import extra

# Names that are less alike than this mean something else: a wrong hint is worse than none.
LIKENESS = 0.75


def theirs(path: str) -> Any:
    """Return the record that answers a key of another library (`Habit`); None for one that exists here under other
    choices."""
    is_here = any(path == leaf.path or (leaf.within and path == leaf.name) for leaf in all_leaves())
    return None if is_here else extra("habit_of")(path)


def unknown(path: str, value: object, leaves: Mapping[str, Leaf], tags: Mapping[str, str]) -> str:
    """Return what is wrong with a key that is not among `leaves`, those that exist under these tags."""
    leaf = path.rsplit(".", 1)[-1]
    habit = theirs(path)
    if habit is not None:
        is_off = value is None or (value is False and extra("is_off_anyway")(leaf))
        why = "has no effect" if value is None else "is what happens anyway"
        asks = f"leave it out ({value} {why}), or " * (is_off and bool(habit.here))
        return f"unknown key {path!r}: {asks}{habit.advice}"
    for section, choice in CHOICES.items():
        owners = [m for m in choice.members if m != tags[section] and _has(path, {**tags, section: m}, leaves)]
        if not owners:
            continue
        remedy = choice.remedy if tags[section] == choice.default else ""
        if (tags[section], owners) == ("vllm", ["inplace"]):
            remedy = f"an argument of vLLM itself is given as rollout.engine_args.{leaf}"
        if choice.tag is None:
            return f"key {path!r} would do nothing: {remedy}"
        return (
            f"key {path!r} would do nothing: it belongs to {section}.{choice.tag}={' or '.join(owners)}, not "
            f"{tags[section]}" + (f"; {remedy}" if remedy else "")
        )
    names = {p.rsplit(".", 1)[-1]: p for p in leaves} | {p: p for p in leaves}
    near = [names[leaf]] if leaf in names else difflib.get_close_matches(path, names, n=1, cutoff=LIKENESS)
    near = near or difflib.get_close_matches(leaf, names, n=1, cutoff=LIKENESS)
    near = [names[name] if leaves[names[name]].within else name for name in near]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown key {path!r}{hint} (`hybrid-rl keys` lists all)"


def _has(path: str, tags: Mapping[str, str], leaves: Mapping[str, Leaf]) -> bool:
    """Return whether such a key, which is not among `leaves`, would exist under these tags."""
    elsewhere = [leaf for place, leaf in visible_leaves(tags).items() if place not in leaves]
    rests = [leaf.path.rpartition(".")[0] for leaf in elsewhere if leaf.metadata["takes_rest"]]
    keys = {leaf.key.path for leaf in elsewhere} - {leaf.key.path for leaf in leaves.values()}
    names = {p.rpartition(".")[2] for p in (*keys, *(leaf.path for leaf in elsewhere))}
    is_of_any = path.rpartition(".")[2] in {leaf.path.rpartition(".")[2] for leaf in all_leaves()}
    is_entry = not is_of_any and any(path.startswith((f"{key}.", f"{key.rpartition('.')[2]}.")) for key in keys)
    return is_entry or path.rpartition(".")[0] in rests or path.rpartition(".")[2] in names
