"""Keys and values of other libraries, with what stands for each here: for errors and for the tables of the
documentation. They are data, in the YAML files of this folder, which are read when they are first needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hybrid_rl.extras.names.records import Habit, Kind, read_records, read_table

__all__ = ["Habit", "Kind", "by_end", "habit_of", "is_off_anyway", "names", "records", "value_advice"]

FILES = ("trl", "transformers", "verl", "others")  # the first that has a name answers it
NUM_PLACES = 16  # of a list or of GPUs, where a value is known at each


@functools.cache
def records() -> tuple[Habit, ...]:
    """Return the keys of all libraries."""
    return tuple(habit for file in FILES for habit in read_records(file))


@functools.cache
def names() -> frozenset[str]:
    """Return the names of all records."""
    return frozenset(habit.name for habit in records())


@functools.cache
def by_end() -> Mapping[str, Habit]:
    """Return records by their names and by every end of these, in which people also know them: `rollout.n`, `n`."""
    plain_words = set(read_table("values")["plain words"])
    index: dict[str, Habit] = {}
    for habit in records():
        if habit.kind == "same" or habit.name[-1] == "*":
            continue
        parts = habit.name.split(".")
        for start in range(len(parts)):
            if start < len(parts) - 1 or not start or parts[start] not in plain_words:
                index.setdefault(".".join(parts[start:]), habit)
    return MappingProxyType(index)


@functools.cache
def _same() -> Mapping[str, Habit]:
    return {habit.name: habit for habit in records() if habit.kind == "same" and "." in habit.name}


@functools.cache
def _sections() -> Mapping[str, Habit]:
    """Return the sections all of whose keys are answered alike."""
    return {habit.name.removesuffix(".*"): habit for habit in records() if habit.name[-1] == "*"}


def habit_of(path: str) -> Habit | None:
    """Return the record that answers a key, given by name or path: that of the longest end of the path that is known
    elsewhere, by itself or as part of a section. None if nobody else has such a key."""
    same, others, sections = _same(), by_end(), _sections()
    parts = path.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        if end in same or end in others:
            return same.get(end) or others[end]
        around = [section for section in sections if end.startswith(f"{section}.")]
        if around:
            return sections[max(around, key=len)]
    return None


def is_off_anyway(name: str) -> bool:
    """Return whether a switch of another library is off here unless another key is set."""
    return name in read_table("values")["off anyway"]


@functools.cache
def _values() -> Mapping[tuple[str, str | bool], str]:
    def filled(place: int, *texts: Any) -> tuple[Any, ...]:
        return tuple(text.replace("{n}", str(place)) if isinstance(text, str) else text for text in texts)

    known = [(path, *entry) for path, answers in read_table("values")["values"].items() for entry in answers.items()]
    entries = (filled(place, *entry) for entry in known for place in range(NUM_PLACES))
    return {(path, value): advice for path, value, advice in entries}


def value_advice(path: str, value: str | bool) -> str | None:
    """Return what to do in place of a value that other libraries know; None if it is not one of theirs."""
    return _values().get((path, value))
