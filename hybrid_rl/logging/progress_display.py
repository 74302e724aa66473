"""Progress of a run for a person who watches: a line for steps, live lines on a terminal, signs of life elsewhere."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from hybrid_rl.compat.noise import hush
from hybrid_rl.logging.console_samples import completion_block
from hybrid_rl.logging.lines import (
    History,
    bar_line,
    clock,
    detail_lines,
    fitted,
    line_of,
    step_line,
    summary_lines,
    work_line,
)
from hybrid_rl.logging.screens import Screen, make_screen
from hybrid_rl.logging.warned import LibraryWarnings
from hybrid_rl.process import progress

NUM_LINES = 40  # of steps over a whole run, besides evaluations
START_SECONDS = 15.0  # between signs of life while a run starts
STEP_SECONDS = 60.0  # and while a step is under way
SOON_SECONDS = 2.0  # what is over sooner needs no sign
NUM_RECENT = 20  # steps whose mean tells the time that is left
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class ProgressDisplay:
    """Display of the training steps of a run of `max_steps`. level: as the key log_level. file: instead of stderr."""

    def __init__(self, max_steps: int, level: str = "normal", *, file: TextIO | None = None) -> None:
        self._screen: Screen = make_screen(level, file)
        hush(shows_all=level == "debug")
        self._is_debug = level == "debug"
        self._max_steps = max_steps
        self._every = max(1, max_steps // NUM_LINES)
        self._latest: dict[str, float] = {}
        self._step = self._first_step = 0
        self._history = History()
        self._begun = self._ended = self._said_at = time.monotonic()
        self._moments: deque[float] = deque(maxlen=NUM_RECENT + 1)
        self._open = contextlib.ExitStack()
        warnings = LibraryWarnings(partial(_warn, self._screen), is_json=level == "json")
        self.close = weakref.finalize(self, warnings.close)  # forgets the warnings that were shown; idempotent
        self.close.atexit = False

    # ------------------------------------------------------------------------------------------------ start and end

    @contextlib.contextmanager
    def starting(self, what: str, hint: str = "", *, is_long: bool = False) -> Iterator[None]:
        """Show that a run starts, and with what it is busy, while the block lasts, so that a silent program is not
        taken for a dead one. is_long: say so at once."""
        begun = time.monotonic()
        if is_long and not self._screen.is_live:
            self.message(what)

        def words() -> str:
            work = work_line(progress.everywhere())
            return f"{what}: {work}" if work else what

        def live(width: int) -> list[Text]:
            seconds = time.monotonic() - begun
            if seconds < SOON_SECONDS and not is_long:
                return [Text("")]
            turn = "" if self._screen.is_plain else SPINNER[int(seconds * 4) % len(SPINNER)] + " "
            tail = f"  {clock(seconds)}"
            return [Text(fitted(f"{turn}{words()}", width - len(tail)) + tail)]

        def remind() -> str:
            about = f" ({hint})" if hint else ""
            return f"still {words()}, for {time.monotonic() - begun:.0f} s{about}"

        with self._shown(live, remind, START_SECONDS):
            yield

    def start(self, step: int, *, goes_on: bool = False) -> None:
        """Begin the display of `fit` after so many completed training steps. goes_on: of the one under way, which has
        gone back to this step: its summary tells of all that is left of it, and its time goes on."""
        self.stop()
        if goes_on:
            self._history.keep_until(step)
        else:
            self._history, self._begun = History(), time.monotonic()
        self._step = self._first_step = step
        self._moments.clear()
        self._moments.append(time.monotonic())
        self._open.enter_context(self._shown(self._live_lines, self._remind, STEP_SECONDS))

    def retotal(self, max_steps: int) -> None:
        """Count up to another last step."""
        self._max_steps, self._every = max_steps, max(1, max_steps // NUM_LINES)

    def stop(self) -> None:
        """Remove the live lines."""
        self._ended = time.monotonic()
        self._open.close()

    @contextlib.contextmanager
    def _shown(self, live: Any, remind: Any, every: float) -> Iterator[None]:
        """Have live lines on a screen that can show them inside the block; elsewhere a line after every so many seconds
        of silence."""
        with contextlib.ExitStack() as stack:
            if not self._screen.is_live:
                stack.enter_context(self._reminding(remind, every))
            stack.enter_context(progress.watching())
            stack.callback(self._screen.end)
            self._screen.watch(live)
            yield

    @contextlib.contextmanager
    def _reminding(self, words: Any, every: float) -> Iterator[None]:
        is_over = threading.Event()
        self._said_at = time.monotonic()

        def run() -> None:
            while not is_over.wait(max(0.001, self._said_at + every - time.monotonic())):
                if time.monotonic() - self._said_at >= every:
                    self._say("progress", Text(words()))

        thread = threading.Thread(target=run, name="still", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    # ------------------------------------------------------------------------------------------------------- lines

    def _say(self, kind: str, text: Text, **fields: Any) -> None:
        self._said_at = time.monotonic()
        self._screen.say(kind, text, fields)

    def message(self, text: str) -> None:
        """Print one line."""
        self._say("message", Text(text))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a training step, or (step 0) the evaluation before the first."""
        self._history.add(step, metrics)
        if not step:
            if line := line_of(metrics):
                self._say("step", Text(f"before training: {line}"), step=0, metrics=metrics)
            return
        self._step = step
        self._moments.append(time.monotonic())
        self._latest.update(metrics)
        if self._screen.takes_all:
            self._say("step", Text(), step=step, max_steps=self._max_steps, metrics=metrics)
        elif self._has_line(step, metrics):
            self._say("step", step_line(step, self._max_steps, metrics, self._screen.width))
            if self._is_debug:
                for line in detail_lines(metrics):
                    self._say("step", Text(f"  {line}", "dim"))

    def _has_line(self, step: int, metrics: Mapping[str, float]) -> bool:
        is_evaluated = any(name.startswith("eval/") for name in metrics)
        return is_evaluated or step % self._every == 0 or step in (1, self._max_steps)

    def completions(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Print samples of a step. samples: their records, as in samples.jsonl."""
        for sample in samples:
            self._say("completions", completion_block(sample, self._screen.width), step=step, sample=dict(sample))

    def summary(self, folder: Path) -> None:
        """Print how the run went since `start`, and where its results are. Does nothing if it made no step."""
        if not self._history.num_steps:
            return
        near = os.path.relpath(folder)
        place = str(folder) if near.startswith("..") else near
        seconds = self._ended - self._begun
        lines = summary_lines(self._history, seconds, place, is_plain=self._screen.is_plain)
        fields = {"steps": self._history.num_steps, "seconds": round(seconds, 3), "folder": str(folder)}
        self._say("summary", Text("\n").join(lines), **fields)

    # -------------------------------------------------------------------------------------------------- live lines

    def _seconds_left(self) -> float | None:
        """Estimate the rest of the run from its last steps, with what came between them."""
        if len(self._moments) < 2:
            return None
        each = (self._moments[-1] - self._moments[0]) / (len(self._moments) - 1)
        since = min(time.monotonic() - self._moments[-1], each)
        return max(0.0, each * (self._max_steps - self._step) - since)

    def _live_lines(self, width: int) -> list[Text]:
        elapsed = time.monotonic() - self._begun
        is_plain = self._screen.is_plain
        lines = [bar_line(self._step, self._max_steps, elapsed, self._seconds_left(), width, is_plain=is_plain)]
        if self._every > 1 and self._latest:  # most steps have no line of their own
            lines.append(Text(fitted(line_of(self._latest), width), "dim"))
        lines.append(Text(fitted(work_line(progress.everywhere()), width), "dim"))
        return lines

    def _remind(self) -> str:
        work = work_line(progress.everywhere())
        since = time.monotonic() - self._moments[-1]
        return f"step {self._step + 1}/{self._max_steps}: {work or 'under way'}, for {since:.0f} s"


def _warn(screen: Screen, text: str, level: str) -> None:
    """Show a warning or an error. A function, so that what keeps it alive does not keep the display alive."""
    style = "yellow" if level == "warning" else "red"
    screen.say("warning", Text.assemble((f"{level}: ", style), text), {"level": level, "text": text})
