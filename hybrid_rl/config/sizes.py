"""Sizes of memory as users write them."""

from __future__ import annotations

import re
from decimal import Decimal

from hybrid_rl.errors import ConfigError

_UNITS = {"b": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for kind, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
MOST_BYTES = 2**63 - 1


def memory_bytes(text: str, name: str) -> int:
    """Return the bytes of a size such as 80GB or 80G (10^9), 64GiB (2^30) or 1500000B. name: of the key, for the error.

    Raises ConfigError for anything else, for less than a byte, for more than 2^63 of them, and for a number without a
    unit: 80 may be meant as gigabytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match and not match[2]:
        raise ConfigError(f"{name}={text!r} has no unit; write {match[1]}GB, {match[1]}GiB, or {match[1]}B for bytes")
    size = int(Decimal(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 1 <= size <= MOST_BYTES:
        raise ConfigError(f"{name}={text!r} is not a size of memory; write it as 80GB, 64GiB or 1500000B")
    return size
