"""Failures of tools in a row: one warning per tool that always fails, which only the policy would be told of."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter
from pathlib import Path

logger = logging.getLogger("hybrid_rl")

FAILURES_IN_A_ROW = 10
# What stands between a call and the function of the user.
OWN_FILES = {
    str(Path(__file__).with_name(name)) for name in ("calls.py", "environments.py", "tool_calling.py", "tools.py")
}


class FailureWatch:
    """Counts by tool, over all trajectories of a rank, the calls that failed since one did not, and warns once per tool
    of FAILURES_IN_A_ROW. Calls that were not made, because their arguments were wrong, do not count: they are mistakes
    of the policy."""

    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()
        self._first: dict[str, str] = {}  # how the first of a row failed
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def look(self, name: str, error: BaseException | None) -> None:
        """Take the outcome of a call of a tool. error: None if it did not fail."""
        with self._lock:
            if name in self._warned:
                return
            if error is None:
                del self._failed[name]
                return
            self._failed[name] += 1
            if self._failed[name] == 1:
                self._first[name] = _told(error)
            if self._failed[name] < FAILURES_IN_A_ROW:
                return
            self._warned.add(name)
        logger.warning(
            "the last %d calls of the tool %r all failed; the policy is told each time, and the run goes on "
            "(tools/failure_frequency counts them). The first of them: %s",
            *(FAILURES_IN_A_ROW, name, self._first[name]),
        )


def _told(error: BaseException) -> str:
    """Format an error with its traceback from the user's code on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in OWN_FILES:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()
