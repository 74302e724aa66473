"""Private names of other libraries, one file per library: what each is needed for, and the versions it was tried with.

Nothing else in the package uses a private name of torch, transformers, Ray or vLLM, so a release that moves one breaks
one file here, and a test of that name fails first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """Something in which the oldest and the newest tried version of a library differ.

    is_there: found out from an object of the library, not from the version, so that versions between the tried ones are
    taken for what they are. bridge: what is done without it. names: attributes that come with it, and that this library
    uses only if it is there. in_newest: whether the newest version has it and the oldest does not, or the reverse.
    """

    what: str
    is_there: Callable[[Any], bool]
    bridge: str
    names: frozenset[str] = frozenset()
    in_newest: bool = True
