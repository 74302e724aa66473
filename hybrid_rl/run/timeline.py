"""The timeline of a run: when each part of a training step began and how long it took, in timeline.jsonl."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from hybrid_rl.logging.run_folder import JsonLines
from hybrid_rl.workers.groups import PolicyGroup

FILE = "timeline.jsonl"
DIGITS = 6  # of seconds: microseconds


class Timeline:
    """Writes a record for each training step: when the driver did what, and in which phase of the cycle each rank was.

    A record has `step`; `start`, in seconds since the epoch; `seconds`, until the step was logged, evaluated and saved;
    `phases`, [name, seconds after the start, seconds] for each part that the driver waited for, in order; and `ranks`,
    for each rank the same of its own phases, by the clock of its host. Those that end after the metrics of a step were
    made, such as an evaluation, are in the record of the next step, before its start.
    """

    def __init__(self, policy: PolicyGroup, folder: Path) -> None:
        self._policy, self._file = policy, JsonLines(folder / FILE)
        self._start: float | None = None
        self._phases: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Enclose a training step with everything that is due after it; one that fails has no record."""
        self._start, self._phases = time.time(), []
        try:
            yield
            if not self._policy.has_ended:
                self._write(step, self._start)
        finally:
            self._start = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enclose a part of a step. Outside of steps nothing is noted."""
        start = time.time()
        try:
            yield
        finally:
            if self._start is not None:
                self._phases.append((name, start, time.time()))

    def _write(self, step: int, start: float) -> None:
        def after(name: str, begin: float, end: float) -> list[str | float]:
            return [name, round(begin - start, DIGITS), round(max(end - begin, 0.0), DIGITS)]

        ranks = [[after(span.name, span.start, span.end) for span in spans] for spans in self._policy.last_phases()]
        record = {"step": step, "start": round(start, DIGITS), "seconds": round(time.time() - start, DIGITS)}
        self._file.write([record | {"phases": [after(*phase) for phase in self._phases], "ranks": ranks}])
