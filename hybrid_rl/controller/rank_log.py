"""Log of a rank: a file for its output; warnings of the library go to the driver as well."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LIBRARY = "hybrid_rl"


class RankLog(logging.Handler):
    """Sends stdout, stderr, crashes and log records of this process to a file, and keeps the library's warnings until
    they are fetched."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._warnings: list[tuple[int, str]] = []
        self._guard = threading.Lock()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
        faulthandler.enable(sys.stderr)
        lines = logging.StreamHandler(sys.stderr)
        lines.setFormatter(logging.Formatter(FORMAT))
        logging.getLogger().addHandler(lines)
        library = logging.getLogger(LIBRARY)
        library.setLevel(min(library.getEffectiveLevel(), logging.INFO))
        library.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning for the driver."""
        with self._guard:
            self._warnings.append((record.levelno, record.getMessage()))

    def drain(self) -> list[tuple[int, str]]:
        """(level, message) of the warnings since the last call."""
        with self._guard:
            taken, self._warnings = self._warnings, []
        return taken
