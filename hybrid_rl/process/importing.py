"""A sign of life while libraries are imported, which takes seconds in which nothing else could give one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SOON_SECONDS = 1.0


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say on a terminal that `what` is imported, if the block takes longer than a second; the line goes with it."""
    if not sys.stderr.isatty():
        yield
        return
    is_over, lock = threading.Event(), threading.Lock()
    was_told = False

    def tell() -> None:
        nonlocal was_told
        if not is_over.wait(SOON_SECONDS):
            with lock:
                if not is_over.is_set():
                    was_told = True
                    sys.stderr.write(f"importing {what} ...")
                    sys.stderr.flush()

    threading.Thread(target=tell, name="importing", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            is_over.set()
        if was_told:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
