"""Progress of this process's work, for a person who watches: what it does now, and how much of it is done.

Work is noted by whoever does it, and read from another thread, or by another process a few times in a second; noting it
costs less than a microsecond.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Progress:
    """What is done at a moment. names: from the whole to its part ("evaluation", "rollout").

    done, total: counted in `unit`; no unit, no count. is_common: each rank counts the same work, not a share of it.
    tokens: generated so far. seconds: since the counting began.
    """

    names: tuple[str, ...] = ()
    done: int = 0
    total: int = 0
    unit: str = ""
    is_common: bool = False
    tokens: float = 0.0
    seconds: float = 0.0


@dataclass
class _Work:
    name: str
    begun: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    unit: str = ""
    is_common: bool = False
    tokens: float = 0.0


_stack: tuple[_Work, ...] = ()
_heard: dict[tuple[str, int], Progress] = {}
_num_watchers = 0


@contextmanager
def doing(name: str, total: int = 0, unit: str = "") -> Iterator[None]:
    """Note that this process does something inside the block, as a part of what it did before.

    total: how much there is of it, in `unit`, which `advance` counts; or `count` says it later.
    """
    global _stack
    work = _Work(name, total=total, unit=unit)
    _stack = (*_stack, work)
    try:
        yield
    finally:
        # What another thread has begun meanwhile goes on.
        _stack = tuple(other for other in _stack if other is not work)


def count(total: int, unit: str, *, is_common: bool = False) -> None:
    """Say how much there is of what is done now, and begin to count it. is_common: see `Progress`."""
    if _stack:
        work = _stack[-1]
        work.begun, work.done, work.tokens = time.monotonic(), 0, 0.0
        work.total, work.unit, work.is_common = total, unit, is_common


def advance(done: int = 1) -> None:
    """Note that so much more is done, of the innermost work that is counted."""
    if (work := _counted(_stack)) is not None:
        work.done += done


def add_tokens(number: float) -> None:
    """Note tokens that were generated, for the innermost work that is counted."""
    if (work := _counted(_stack)) is not None:
        work.tokens += number


def _counted(stack: Sequence[_Work]) -> _Work | None:
    return next((work for work in reversed(stack) if work.unit), None)


def here() -> Progress:
    """Return what this process does now."""
    stack = _stack
    names, work = tuple(work.name for work in stack if work.name), _counted(stack)
    if work is None:
        return Progress(names)
    seconds = time.monotonic() - work.begun
    return Progress(names, work.done, work.total, work.unit, work.is_common, work.tokens, seconds)


# ------------------------------------------------------------------------------------------- other processes


@contextmanager
def watching() -> Iterator[None]:
    """Say that somebody looks inside the block: only then are other processes asked for their progress."""
    global _num_watchers
    _num_watchers += 1
    try:
        yield
    finally:
        _num_watchers -= 1


def is_watched() -> bool:
    """Whether somebody looks."""
    return _num_watchers > 0


def hear(role: str, reports: Mapping[int, Progress]) -> None:
    """Take what ranks of a role said."""
    _heard.update({(role, rank): report for rank, report in reports.items()})


def forget(role: str) -> None:
    """Forget what ranks of a role said: the call that they worked on has ended."""
    for place in [place for place in _heard if place[0] == role]:
        del _heard[place]


def everywhere() -> Progress:
    """Return what this process does, and within it its ranks, as far as they have said it."""
    own, ranks = here(), joined([*_heard.values()])
    if not ranks.names and not ranks.unit:
        return own
    names = (*own.names, *(name for name in ranks.names if name not in own.names))
    return replace(ranks if ranks.unit else own, names=names)


def joined(reports: Sequence[Progress]) -> Progress:
    """Join the progress of ranks. If they do different things, the thing that most of them do counts; of what all do in
    common, the slowest."""
    if not reports:
        return Progress()
    (names, unit), _ = Counter((report.names, report.unit) for report in reports).most_common(1)[0]
    same = [report for report in reports if (report.names, report.unit) == (names, unit)]
    done, total = sum(report.done for report in same), sum(report.total for report in same)
    if same[0].is_common:
        done, total = min(report.done for report in same), same[0].total
    tokens, seconds = sum(report.tokens for report in same), max(report.seconds for report in same)
    return replace(same[0], done=done, total=total, tokens=tokens, seconds=seconds)
