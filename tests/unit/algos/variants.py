"""Every record of the registry as it is, and with each of its options at another value: what is registered tomorrow is
tested without being named."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

from hybrid_rl.algos.options import range_error
from hybrid_rl.errors import ConfigError


def records(home: Mapping[str, type]) -> dict[str, type]:
    """Those of the library: other tests register their own in the same process."""
    return {name: record for name, record in home.items() if record.__module__.startswith("hybrid_rl.")}


def other_values(item: Any, hint: Any) -> list[Any]:
    """Values of an option that are not its default: all of a choice; of numbers one on each side where there is
    room, and the ends of the range."""
    default = item.default
    options = typing.get_args(hint) if typing.get_origin(hint) is not Literal else (hint,)
    options = options or (hint,)
    found: list[Any] = [None] if type(None) in options else []
    for option in options:
        if typing.get_origin(option) is Literal:
            found += typing.get_args(option)
        elif option is bool:
            found += [True, False]
        elif option in (int, float):
            found += _numbers(option, default, item.metadata)
    return [value for value in found if value != default]


def _numbers(kind: type, default: Any, metadata: Mapping[str, Any]) -> list[Any]:
    start = default if default is not None else _inside(metadata)
    ends = [metadata[bound] for bound in ("minimum", "maximum") if metadata[bound] is not None]
    wanted = [start, start * 2, start / 2, *ends] if start else [0.5, 1.0, *ends]
    numbers = [kind(math.ceil(value)) if kind is int else value for value in wanted]
    return [n for n in dict.fromkeys(numbers) if n != default and not range_error(n, metadata)]


def _inside(metadata: Mapping[str, Any]) -> float:
    low = metadata["minimum"] if metadata["minimum"] is not None else metadata["above"]
    high = metadata["maximum"] if metadata["maximum"] is not None else metadata["below"]
    if low is not None and high is not None:
        return float((low + high) / 2)
    return float(low + 0.5) if low is not None else 0.5


def variants(home: Mapping[str, type]) -> dict[str, Any]:
    """Instances of all records, by name and option: as they are, and with one option changed. What a record refuses is
    left out."""
    found: dict[str, Any] = {}
    for name, record in records(home).items():
        found[name] = record()
        hints = typing.get_type_hints(record)
        for item in dataclasses.fields(record)[1:]:
            for value in other_values(item, hints[item.name]):
                try:
                    found[f"{name} {item.name}={value}"] = record(**{item.name: value})
                except ConfigError:
                    continue
    return found
