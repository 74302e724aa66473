"""Where a run's lines go: a terminal with live lines below them, a stream without, a cell of a notebook, JSON lines, or
nowhere."""

from __future__ import annotations

import contextvars
import html
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hybrid_rl.logging.lines import fitted
from hybrid_rl.metrics.metric_sums import finite

# A terminal echoes ^C where the cursor is: at the end of the last live line. It must not begin a new line there, of
# which rich would know nothing and leave the live lines behind.
MARGIN = 4
REFRESH_PER_SECOND = 4
# Sentences break between words; of other lines a terminal breaks what is too long, so that paths can be copied.
WRAPPED = ("warning", "completions")
NOTEBOOK_SECONDS = 1.0
NOTEBOOK_LINES = 60

LiveLines = Callable[[int], list[Text]]


class TerminalScreen:
    """A terminal: lines stay in the scrollback, live lines are below them."""

    is_live, takes_all = True, False

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self.is_plain = not console.encoding.startswith("utf")

    @property
    def width(self) -> int | None:
        return self._console.width

    def say(self, kind: str, text: Text, fields: Mapping[str, Any]) -> None:
        self._console.print(text, soft_wrap=kind not in WRAPPED)

    def watch(self, lines: LiveLines) -> None:
        self.end()

        def drawn() -> Text:
            room = max(1, self._console.width - MARGIN)
            made = lines(room)
            for line in made:
                line.truncate(room)
            return Text("\n").join(made)

        self._live = Live(
            console=self._console, transient=True, refresh_per_second=REFRESH_PER_SECOND, get_renderable=drawn
        )
        self._live.start()

    def end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


class StreamScreen:
    """A stream that is no terminal: a file, a pipe."""

    is_live, takes_all = False, False
    width: int | None = None

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_plain = not console.encoding.startswith("utf")

    def say(self, kind: str, text: Text, fields: Mapping[str, Any]) -> None:
        self._console.print(text, soft_wrap=True)

    def watch(self, lines: LiveLines) -> None:
        """Show nothing: what moves cannot be taken back here."""

    def end(self) -> None:
        """Nothing is shown that would have to go."""


class QuietScreen(StreamScreen):
    """Warnings only."""

    def say(self, kind: str, text: Text, fields: Mapping[str, Any]) -> None:
        if kind == "warning":
            super().say(kind, text, fields)


class JsonScreen(StreamScreen):
    """One JSON object per line: `time` in seconds since the epoch, `kind`, and what the kind has."""

    takes_all = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._lock = threading.Lock()

    def say(self, kind: str, text: Text, fields: Mapping[str, Any]) -> None:
        record = {"time": round(time.time(), 3), "kind": kind, **(fields or {"text": text.plain})}
        if "metrics" in record:
            record["metrics"] = finite(record["metrics"])
        with self._lock:
            self._console.file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            self._console.file.flush()


class NotebookScreen:
    """A cell of a Jupyter notebook: one output, written again at most once in a second while there are live lines."""

    is_live, is_plain, takes_all = True, False, False
    width: int = 100

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._kept: list[str] = []
        self._lines: LiveLines | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def say(self, kind: str, text: Text, fields: Mapping[str, Any]) -> None:
        if self._lines is None:
            print(text.plain)
            return
        self._kept.extend(text.plain.split("\n"))
        if len(self._kept) > NOTEBOOK_LINES:
            self._kept[:2] = ["..."] if self._kept[0] != "..." else self._kept[:1]
        self._draw()

    def watch(self, lines: LiveLines) -> None:
        self.end()
        self._kept, self._lines, self._handle = [], lines, None
        self._over = over = threading.Event()

        def refresh() -> None:
            while not over.wait(NOTEBOOK_SECONDS):
                self._draw()

        # Jupyter finds the cell that an output belongs to in the context of the thread.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(refresh,), name="notebook", daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._lines is None:
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._lines = None
        if self._handle is not None or self._kept:
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            live = [] if self._lines is None else [fitted(line.plain, self.width) for line in self._lines(self.width)]
            text = "\n".join([*self._kept, *live])
            page = f'<pre style="line-height:1.3;white-space:pre-wrap">{html.escape(text)}</pre>'
            bundle = {"text/plain": text, "text/html": page}
            if self._handle is None:
                self._handle = self._display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)


# What the display writes to. is_plain: whether it shows ASCII only. is_live: whether it shows live lines; if not, the
# display prints a line now and then. takes_all: whether it takes every step, as data. width: cells of a line, None =
# any number. `say` shows a line that stays (kind: step, message, warning, completions or summary; fields: what it says,
# as data), `watch` shows live lines from now on, made for so many cells, and `end` removes them, if there are any.
Screen = TerminalScreen | StreamScreen | NotebookScreen


def make_screen(level: str, file: TextIO | None = None) -> Screen:
    """Return where lines of a run go. level: as the key log_level; file: instead of stderr."""
    console = Console(file=file or sys.stderr, highlight=False, force_jupyter=False)
    if level == "quiet":
        return QuietScreen(console)
    if level == "json":
        return JsonScreen(console)
    if file is None and (display := _notebook_display()) is not None:
        return NotebookScreen(display)
    return TerminalScreen(console) if console.is_terminal and not console.is_dumb_terminal else StreamScreen(console)


def _notebook_display() -> Any:
    """Return IPython's `display` in the kernel of a notebook, else None. Imports nothing: in a notebook it is there."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display
