"""Ctrl-C at the right moment: never between the update of the weights and the note that it happened."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done, then deliver it: KeyboardInterrupt, or whatever handler was there
    before, an outer block of this kind included. A second one passes at once.

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

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pending:
        signal.raise_signal(signal.SIGINT)
