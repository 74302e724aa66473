"""Options of the configuration: fields of frozen dataclasses with a description and a range."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import Field, field, fields
from numbers import Real
from typing import Any, get_type_hints


def key(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    takes_rest: bool = False,
    remedy: str = "",
    within: str = "",
) -> Any:
    """Declare a configuration key.

    minimum, maximum: inclusive bounds.
    above, below: exclusive bounds.
    takes_rest: whether names that its section does not have become entries of this mapping.
    remedy: what to do about a value out of bounds, if the answer is not simply another value.
    within: the mapping of its section of which the key is an entry."""
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum, "above": above, "below": below}
    metadata |= {"takes_rest": takes_rest, "remedy": remedy, "within": within}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def entries(record: type, doc: str) -> Any:
    """Declare a key that is a mapping: its entries are the keys of a record, a frozen dataclass."""
    return field(default_factory=record, metadata={"doc": doc, "takes_rest": False})


def place(item: Field[Any]) -> str:
    """Return where the key of a field stands in its section: its name, after that of the mapping that it is within."""
    return ".".join(filter(None, (item.metadata.get("within"), item.name)))


def range_error(value: Any, metadata: Mapping[str, Any]) -> str:
    """Return what is wrong with a value ("must be at least 0"); empty if it is within bounds or not a number.
    metadata: of the field, from `key`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return ""
    if not math.isfinite(value):
        return "must be a finite number"
    bounds = (
        ("minimum", "at least", lambda limit: value >= limit),
        ("maximum", "at most", lambda limit: value <= limit),
        ("above", "above", lambda limit: value > limit),
        ("below", "below", lambda limit: value < limit),
    )
    for bound, words, holds in bounds:
        limit = metadata.get(bound)
        if limit is not None and not holds(limit):
            # The remedy of a fixed value is for those who want more of it.
            has_remedy = metadata.get("remedy") and (bound, metadata.get("maximum")) != ("minimum", limit)
            return f"must be {words} {limit}" + (f": {metadata['remedy']}" if has_remedy else "")
    return ""


@functools.cache
def field_types(section: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, in their order."""
    hints = get_type_hints(section)
    return {item.name: hints[item.name] for item in fields(section)}
