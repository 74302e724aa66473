"""Sizes of memory as users write them."""

from __future__ import annotations

import re

from hybrid_rl.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("iB", 1024))
}


def memory_bytes(text: str, name: str) -> int:
    """Return the bytes of a size such as 80GB (10^9), 64GiB (2^30) or 1500000. name: of the key, for the error.

    Raises ConfigError for anything else, and for less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", text.strip(), re.IGNORECASE)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = int(float(match[1]) * units[(match[2] or "").lower()]) if match else 0
    if size < 1:
        raise ConfigError(f"{name}={text!r} is not a size of memory; write it as 80GB, 64GiB or a number of bytes")
    return size
