"""How an option is declared: a field of a frozen dataclass with its meaning and its range."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    takes_rest: bool = False,
) -> Any:
    """A configuration leaf. minimum and maximum are inclusive bounds, `above` and `below` exclusive ones. takes_rest:
    names that its section does not have become entries of this mapping."""
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum, "above": above, "below": below}
    metadata["takes_rest"] = takes_rest
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
