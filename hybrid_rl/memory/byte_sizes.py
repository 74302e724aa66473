"""Numbers of bytes as people read and write them: decimal, as in configuration keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of memory, of so many bytes."""

    name: str
    num_bytes: int

    def number(self, num_bytes: float) -> str:
        """Return a size in this unit, without its name: nothing is shown as 0 that is not."""
        if not num_bytes:
            return "-"
        value = num_bytes / self.num_bytes
        if self.num_bytes == 1:
            return f"{value:.0f}"
        if abs(value) < 0.005:
            return "<0.01"
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"


UNITS = (Unit("TB", 10**12), Unit("GB", 10**9), Unit("MB", 10**6), Unit("kB", 10**3), Unit("B", 1))


def unit_of(sizes: Iterable[float]) -> Unit:
    """Return the unit in which the largest of these sizes is at least 1, so that a column has one unit."""
    largest = max((abs(size) for size in sizes), default=0)
    # Terabytes would make columns of a usual GPU's memory hard to compare.
    return next((unit for unit in UNITS[1:] if largest >= unit.num_bytes), UNITS[-1])


def size_text(num_bytes: float) -> str:
    """Return a size in the unit that suits it: 13.4 GB, 152 MB, 0 B."""
    unit = next((unit for unit in UNITS if abs(num_bytes) >= unit.num_bytes), UNITS[-1])
    value = num_bytes / unit.num_bytes
    digits = 0 if unit.num_bytes == 1 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit.name}"
