"""Plain values as JSON and back, on both sides of the sandbox, and when two of them are the same result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LEAST = 1e-9  # difference of numbers with a fraction that never counts
TOLERANCE = 1e-6  # of numbers with a fraction, relative; as judges of programming contests commonly allow


# The text of these two functions is also part of the programs in the sandbox, which see nothing of this file.
def spell(value: Any) -> Any:
    """Write a plain value as JSON holds it; what is derived from a plain type (a Counter, a named tuple) is written as
    that type, and numpy's as lists and numbers. Raises TypeError for any other."""
    if value is None or type(value) is bool:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < 2**53 else {"int": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        return real if real - real == 0 else {"float": repr(real)}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, list):
        return [spell(item) for item in list.__iter__(value)]
    kinds: tuple[Any, ...] = (tuple, set, frozenset)
    for kind in kinds:
        if isinstance(value, kind):
            return {kind.__name__: [spell(item) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[spell(key), spell(item)] for key, item in dict.items(value)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return spell(value.tolist())
    raise TypeError(f"{type(value).__name__} is not a plain value")


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
    is_one = isinstance(wanted, list | tuple) and len(wanted) == 1
    return _is_same(value, wanted) or (is_one and _is_same(value, wanted[0]))


def _is_same(value: Any, wanted: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(wanted, list | tuple):
        return len(value) == len(wanted) and all(map(_is_same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, Mapping):
        named = {str(key): item for key, item in value.items()}
        return len(named) == len(wanted) and all(
            str(key) in named and _is_same(named[str(key)], item) for key, item in wanted.items()
        )
    if isinstance(value, float) or isinstance(wanted, float):
        are_numbers = all(isinstance(side, int | float) for side in (value, wanted))
        return are_numbers and math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=LEAST)
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
        return math.isclose(float(word), float(wanted), rel_tol=TOLERANCE, abs_tol=LEAST)
    except ValueError:
        return False
