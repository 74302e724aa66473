"""The memory of this process over its last training steps: which resident took how much when, and in which phase."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hybrid_rl.memory.residents import Transition

KEPT_STEPS = 4
KEPT_LEVELS = 4096  # of one step, which may hold any number of evaluations


@dataclass(frozen=True)
class Span:
    """A phase of the cycle. start, end: seconds since the epoch. peak_bytes: the most that was taken on the device, by
    whatever; None if that was not measured."""

    name: str
    start: float
    end: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Level:
    """The bytes of a resident from a moment on (seconds since the epoch)."""

    at: float
    tag: str
    num_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """The memory of one process over a training step: from the first phase or move after the last one to its end.

    start, end: seconds since the epoch. before: bytes by resident at the start; levels: what changed since, in
    order. phases: when the process was in a phase of the cycle, by their end. moves: sleeps and wakes, in order.
    """

    start: float
    end: float
    before: Mapping[str, int]
    levels: tuple[Level, ...]
    phases: tuple[Span, ...]
    moves: tuple[Transition, ...]

    def series(self) -> tuple[list[float], dict[str, list[int]]]:
        """Return M moments in seconds since the start, from 0 to the end of the step, and for every resident [M] bytes:
        what it takes from each moment to the next."""
        moments, bytes_of = [0.0], {tag: [num_bytes] for tag, num_bytes in self.before.items()}
        for level in self.levels:
            if level.tag not in bytes_of:
                bytes_of[level.tag] = [0] * len(moments)
            if level.at - self.start > moments[-1]:
                moments.append(level.at - self.start)
                for row in bytes_of.values():
                    row.append(row[-1])
            bytes_of[level.tag][-1] = level.num_bytes
        for row in bytes_of.values():
            row.append(row[-1])
        return [*moments, self.end - self.start], bytes_of


class History:
    """Keeps the last KEPT_STEPS steps."""

    def __init__(self) -> None:
        self._steps: deque[StepMemory] = deque(maxlen=KEPT_STEPS)
        self._known: dict[str, int] = {}
        self._has_started = False
        self._begin()

    def _begin(self) -> None:
        self._start: float | None = None  # what the driver does between steps is not shown
        self._before = dict(self._known)
        self._levels: deque[Level] = deque()
        self._phases: deque[Span] = deque(maxlen=KEPT_LEVELS)
        self._moves: deque[Transition] = deque(maxlen=KEPT_LEVELS)

    def start(self, resident_bytes: Callable[[], Mapping[str, int]]) -> None:
        """Learn what has been in memory since before the first phase: what never moves is noted nowhere else in the
        first step. resident_bytes: by tag, 0 if it sleeps. Later calls do nothing."""
        if not self._has_started:
            unmoved = {tag: size for tag, size in resident_bytes().items() if tag not in self._known}
            self._known |= unmoved
            self._before |= unmoved
            self._has_started = True

    @property
    def steps(self) -> list[StepMemory]:
        """The complete steps that are kept, oldest first."""
        return list(self._steps)

    @contextmanager
    def phase(self, name: str, peak: Callable[[], int | None] = lambda: None) -> Iterator[None]:
        """Note the block as a phase of the cycle. peak: asked for its peak_bytes at the end."""
        start = time.time()
        self._start = start if self._start is None else self._start
        try:
            yield
        finally:
            self._phases.append(Span(name, start, time.time(), peak()))

    def note(self, moved: Iterable[Transition]) -> None:
        """Add transitions, oldest first: a resident that sleeps has given its memory back at the end of its, one that
        wakes takes it from the start on."""
        before, end = -1.0, 0.0
        for move in moved:
            self._start = move.start if self._start is None else self._start
            self._moves.append(move)
            if move.start != before:  # else it went to sleep in one call with the last one
                before, end = move.start, move.start + move.seconds
            if move.awake:
                self._add(move.start, move.tag, move.num_bytes)
            else:
                self._add(end, move.tag, 0)

    def _add(self, at: float, tag: str, num_bytes: int) -> None:
        if self._known.get(tag) == num_bytes:
            return
        self._known[tag] = num_bytes
        self._levels.append(Level(at, tag, num_bytes))
        if len(self._levels) > KEPT_LEVELS:
            oldest = self._levels.popleft()
            self._before[oldest.tag] = oldest.num_bytes

    def end_step(self, bytes_now: Mapping[str, int]) -> None:
        """Close the record of the step that is running, and begin the next. bytes_now: by resident, 0 if it sleeps."""
        now = time.time()
        for tag, num_bytes in bytes_now.items():
            self._add(now, tag, num_bytes)
        levels = sorted(self._levels, key=lambda level: level.at)
        step = (dict(self._before), tuple(levels), tuple(self._phases), tuple(self._moves))
        self._steps.append(StepMemory(now if self._start is None else self._start, now, *step))
        self._begin()
