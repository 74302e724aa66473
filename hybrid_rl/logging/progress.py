"""Progress of a run for a person who watches: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hybrid_rl.batch import SampleKey

COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("eval reward", "eval/reward", "{:.3f}"),
    ("eval accuracy", "eval/accuracy", "{:.1%}"),
    ("len", "completions/mean_length", "{:.1f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("|g|", "grad_norm", "{:.2f}"),
    ("s/step", "step_time", "{:.2f}"),
)
LARGE = 1e6  # from here on an exponent is shorter than the digits
NUM_LINES = 40  # plain lines over a whole run, if there is no live display

STILL_SECONDS = 20.0  # between messages about something slow


@contextlib.contextmanager
def still(show: Callable[[str], None], what: str, hint: str) -> Iterator[None]:
    """Report repeatedly, with the hint, that something is still going on while the block lasts, so that a
    silent program is not taken for a dead one."""
    begun, is_over = time.monotonic(), threading.Event()

    def remind() -> None:
        while not is_over.wait(STILL_SECONDS):
            show(f"still {what}, for {time.monotonic() - begun:.0f} s: {hint}")

    show(what)
    thread = threading.Thread(target=remind, name="still", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class ProgressDisplay:
    """Display of the training steps of a run of `max_steps`."""

    def __init__(self, max_steps: int, *, file: TextIO | None = None) -> None:
        self.console = Console(file=file or sys.stderr, highlight=False, soft_wrap=True)
        self._max_steps = max_steps
        self._every = max(1, max_steps // NUM_LINES)
        self._latest: dict[str, float] = {}
        self._bar: Progress | None = None
        self._task: Any = None

    def start(self, step: int) -> None:
        """Begin the display after so many completed training steps."""
        if not self.console.is_terminal:
            return
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
        )
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._task = self._bar.add_task("training", total=self._max_steps, completed=step, line="")
        self._bar.start()

    def retotal(self, max_steps: int) -> None:
        """Count up to another last step."""
        self._max_steps, self._every = max_steps, max(1, max_steps // NUM_LINES)
        if self._bar is not None:
            self._bar.update(self._task, total=max_steps)

    def stop(self) -> None:
        """Clear the live line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def message(self, text: str) -> None:
        """Print one line."""
        self.console.print(Text(text))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a training step."""
        self._latest.update(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, line=escape(line_of(self._latest)))
        elif step % self._every == 0 or step in (1, self._max_steps) or "eval/reward" in metrics:
            self.message(f"step {step}/{self._max_steps}  {line_of(metrics)}  {handoff_line(metrics)}")

    def completions(self, step: int, samples: Sequence[tuple[SampleKey, str, str, float]]) -> None:
        """Print a table of samples. samples: key, prompt, completion and reward (NaN = none) of each."""
        table = Table(title=f"completions of step {step}", title_justify="left")
        for title in ("prompt", "completion", "reward"):
            table.add_column(title, overflow="fold")
        for _, prompt, completion, reward in samples:
            # Text, not str, so that markup and emoji codes from a model are shown as they are.
            table.add_row(Text(prompt), Text(completion), "masked" if math.isnan(reward) else number("{:.3f}", reward))
        self.console.print(table)


def line_of(metrics: Mapping[str, float]) -> str:
    """Format the main metrics, those that exist, as one line."""
    return "  ".join(f"{title} {number(form, metrics[name])}" for title, name, form in COLUMNS if name in metrics)


def number(form: str, value: float) -> str:
    """Format a number; in exponential form if it is very large."""
    return f"{value:g}" if abs(value) >= LARGE else form.format(value)


def handoff_line(metrics: Mapping[str, float]) -> str:
    """Describe the last handoff: version, bytes of the rank with the most, seconds, and how it was verified."""
    if "handoff/version" not in metrics:
        return ""
    gap = f", probe gap {metrics['handoff/probe_gap']:.1e}" if "handoff/probe_gap" in metrics else ""
    unproven = int(metrics.get("handoff/unproven_bytes", 0))
    verified = f", all but {unproven:,} B verified" if unproven else ", every byte verified"
    proof = verified if "timing/verify" in metrics else ""
    return (
        f"handoff v{int(metrics['handoff/version'])}: {int(metrics['handoff/bytes']):,} B in "
        f"{metrics['timing/handoff'] * 1000:.1f} ms{gap}{proof}"
    )
