"""Numbers of bytes and seconds as people read them."""

from __future__ import annotations

from hybrid_rl.memory.byte_sizes import Unit, size_text, unit_of

__all__ = ["Unit", "count_text", "seconds_text", "size_text", "unit_of"]


def count_text(number: int) -> str:
    """Return a number of parameters: 5,472, 494 M, 7.62 B."""
    for name, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"


def seconds_text(seconds: float) -> str:
    """Return a time to two digits: 0.042 s, 3.1 s, 95 s."""
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2g} s" if seconds >= 0.0005 else "<0.001 s" if seconds else "0 s"
