"""What metrics mean: one line for each name or pattern of names."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from pathlib import Path

from hybrid_rl.process.files import read_yaml

EVALUATION = "eval/"


@functools.cache
def meanings() -> dict[str, str]:
    """Return what metrics mean by patterns of their names, of which the first that fits counts."""
    return read_yaml(Path(__file__).with_suffix(".yaml"))


@functools.cache
def meaning_of(metric: str) -> str:
    """Return what a metric means in a line; "" for one that is not known, such as a reward function's own."""
    name = metric.removeprefix(EVALUATION)
    names = (name, name.partition("/")[2]) if name != metric else (name,)  # eval/<set>/... too
    texts = (text for candidate in names for pattern, text in meanings().items() if fnmatchcase(candidate, pattern))
    return next(texts, "")
