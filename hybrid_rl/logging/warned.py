"""Warnings of the library on the console: each text once in a run, above the live lines."""

from __future__ import annotations

import logging
from collections.abc import Callable

LIBRARY = "hybrid_rl"
# Given as `extra` to a warning that tells news even if its text was seen before.
AGAIN = {"may_repeat": True}


class LibraryWarnings(logging.Handler):
    """Shows what the library logs from warnings upwards, and drops texts that were logged before. Of several Trainers
    that are open the last one does this, so that a new one warns of what an earlier one warned of too.

    show: called with the text and "warning" or "error". If the program has set up logging itself, its handlers show
    them instead, unless is_json.
    """

    def __init__(self, show: Callable[[str, str], None], *, is_json: bool) -> None:
        super().__init__(logging.WARNING)
        self._show, self._is_json = show, is_json
        self._seen: set[str] = set()
        library = logging.getLogger(LIBRARY)
        library.addFilter(self._is_new)
        library.addHandler(self)

    def _is_new(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or getattr(record, "may_repeat", False) or not self._is_last:
            return True
        text = record.getMessage()
        is_new = text not in self._seen
        self._seen.add(text)
        return is_new

    @property
    def _is_last(self) -> bool:
        ours = [handler for handler in logging.getLogger(LIBRARY).handlers if isinstance(handler, LibraryWarnings)]
        return not ours or ours[-1] is self

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record, unless others do."""
        library = logging.getLogger(LIBRARY)
        others = [*library.handlers, *(logging.getLogger().handlers if library.propagate else ())]
        if not self._is_json and any(not isinstance(handler, LibraryWarnings) for handler in others):
            return
        if self._is_last:
            self._show(record.getMessage(), "warning" if record.levelno < logging.ERROR else "error")

    def close(self) -> None:
        """Show nothing more; idempotent."""
        library = logging.getLogger(LIBRARY)
        library.removeFilter(self._is_new)
        library.removeHandler(self)
        super().close()
