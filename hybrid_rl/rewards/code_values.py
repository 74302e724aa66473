"""Plain values as JSON and back, on both sides of the sandbox, and when two of them are the same result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TOLERANCE = 1e-6  # of numbers with a fraction, relative; as judges of programming contests commonly allow


# The text of these two functions is also part of the programs in the sandbox, which see nothing of this file.
def spell(value: Any) -> Any:
    """Write a plain value as JSON holds it. Types are exact, so what only looks like a list stays where it is. Raises
    TypeError for any other."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 2**53 else {"int": hex(value)}
    if kind is float:
        return value if value - value == 0 else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is list:
        return [spell(item) for item in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [spell(item) for item in value]}
    if kind is dict:
        return {"dict": [[spell(key), spell(item)] for key, item in value.items()]}
    raise TypeError(f"{kind.__name__} is not a plain value")


def unspell(value: Any) -> Any:
    """Read what `spell` wrote. Raises ValueError, TypeError, KeyError, AttributeError or RecursionError for anything
    else."""
    if type(value) is list:
        return [unspell(item) for item in value]
    if type(value) is not dict:
        return value
    ((kind, inner),) = value.items()
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "dict":
        return {unspell(key): unspell(item) for key, item in inner}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(unspell, inner))


def is_same(value: Any, wanted: Any) -> bool:
    """Whether a result is the wanted one, which may come from JSON: tuples are lists, keys are texts, numbers with a
    fraction agree to TOLERANCE. A list of one may be wanted for what is in it (as in APPS)."""
    if isinstance(wanted, list | tuple) and len(wanted) == 1 and not isinstance(value, list | tuple):
        wanted = wanted[0]
    return _is_same(value, wanted)


def _is_same(value: Any, wanted: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(wanted, list | tuple):
        return len(value) == len(wanted) and all(map(_is_same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, Mapping):
        named = {str(key): item for key, item in value.items()}
        return len(named) == len(wanted) and all(
            str(key) in named and _is_same(named[str(key)], item) for key, item in wanted.items()
        )
    if isinstance(value, float) or isinstance(wanted, float):
        are_numbers = all(isinstance(one, int | float) for one in (value, wanted))
        return are_numbers and math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(value == wanted)


def is_same_output(printed: str, wanted: str) -> bool:
    """Whether a program printed what was wanted: line by line the same words; white space at the ends and empty lines
    at the end do not count; numbers with a fraction agree to TOLERANCE."""
    lines, others = ([line.split() for line in text.strip().splitlines()] for text in (printed, wanted))
    return len(lines) == len(others) and all(
        len(words) == len(rest) and all(map(_is_same_word, words, rest))
        for words, rest in zip(lines, others, strict=True)
    )


def _is_same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted and "e" not in wanted.lower():
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False
