"""Sizes of memory as users write them."""

from __future__ import annotations

import re
from decimal import Decimal

from hybrid_rl.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("iB", 1024))
}
MOST_BYTES = 2**63 - 1


def memory_bytes(text: str, name: str) -> int:
    """Return the bytes of a size such as 80GB (10^9), 64GiB (2^30) or 1500000. name: of the key, for the error.

    Raises ConfigError for anything else, for less than a byte, and for more than 2^63 of them.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", text.strip(), re.IGNORECASE | re.ASCII)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = int(Decimal(match[1]) * units[(match[2] or "").lower()]) if match else 0
    if not 1 <= size <= MOST_BYTES:
        raise ConfigError(f"{name}={text!r} is not a size of memory; write it as 80GB, 64GiB or a number of bytes")
    return size
