"""Ctrl-C at the right moment: never between the update of the weights and the note that it happened.

Work that takes long and may be broken off asks `interrupt_requested()` at its own safe points. A worker in another
process gets no signal: whoever controls it calls `request_interrupt()` there.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_requested = threading.Event()


def interrupt_requested() -> bool:
    """Whether a Ctrl-C is being held back in this process, or another process asked for an end."""
    return _requested.is_set()


def request_interrupt() -> None:
    """Ask the work in this process to end at its next safe point. Thread-safe."""
    _requested.set()


def clear_interrupt() -> None:
    """Forget a request, once the work that it was for has ended."""
    _requested.clear()


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done, then deliver it: KeyboardInterrupt, or whatever handler was there
    before, an outer block of this kind included. A second one passes at once. Meanwhile `interrupt_requested()` says
    that one is waiting.

    Only the main thread gets signals; elsewhere, and where Ctrl-C is ignored, the block simply runs.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    pending: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pending:
            raise KeyboardInterrupt
        pending.append(number)
        _requested.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        if pending:
            _requested.clear()
        signal.signal(signal.SIGINT, before)
    if pending:
        signal.raise_signal(signal.SIGINT)
