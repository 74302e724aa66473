"""Ctrl-C at safe points only: never between the update of the weights and the record of it.

Long work that may be interrupted checks `interrupt_requested()` at its own safe points. A worker in another process
gets no signal; its controller calls `request_interrupt()` there instead.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1]) + os.sep

_requested = threading.Event()
_undisturbed = threading.Event()


def interrupt_requested() -> bool:
    """Whether a Ctrl-C is deferred in this process, or another process has requested an interrupt."""
    return _requested.is_set() and not _undisturbed.is_set()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Have the work inside the block not stop at its safe points: it belongs to what must be whole. A Ctrl-C that is
    deferred comes after it, and a second one at once."""
    _undisturbed.set()
    try:
        yield
    finally:
        _undisturbed.clear()


def request_interrupt() -> None:
    """Ask the work in this process to stop at its next safe point. Thread-safe."""
    _requested.set()


def clear_interrupt() -> None:
    """Forget a request once the work that it was meant for has ended."""
    _requested.clear()


@contextmanager
def deferred_interrupt(*, every: bool = False) -> Iterator[None]:
    """Defer Ctrl-C until the block is done, then deliver it: raise KeyboardInterrupt, or call the previous handler (an
    outer block of this kind, say). A second Ctrl-C is delivered at once. Meanwhile `interrupt_requested()` is true.

    every: defer all, for a short block that must not end half way; they are delivered as one.

    Only the main thread gets signals; in other threads, and if Ctrl-C is ignored, the block simply runs.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    pending: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pending and not every:
            raise KeyboardInterrupt
        pending.append(number)
        _requested.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            _requested.clear()
    if pending:
        signal.raise_signal(signal.SIGINT)


def show_shortly(error: BaseException, text: str) -> None:
    """Have IPython show an exception as this text and the user's own line, instead of every frame of the package; its
    hook for that is an attribute of the exception. It stays what it is: cells that wait do not run."""

    def render() -> list[str]:
        lines = [f"{type(error).__name__}: {text}"]
        frames = traceback.extract_tb(error.__traceback__)
        first = next((place for place, frame in enumerate(frames) if frame.filename.startswith(PACKAGE)), len(frames))
        lines += [f"---> {frame.lineno} {frame.line}" for frame in frames[max(first - 1, 0) : first]]
        return ["\n".join(lines)]

    vars(error)["_render_traceback_"] = render
