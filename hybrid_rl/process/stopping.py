"""Requests to stop from outside: signals of a scheduler, and a deadline. They end work as Ctrl-C does, with a reason.

A process group may get a signal twice (`timeout` sends it to its child and to the group), so that a second one counts
only if it comes later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import psutil

logger = logging.getLogger("hybrid_rl")

# What schedulers send before they end a job: Kubernetes, systemd and spot machines SIGTERM, Slurm what --signal= says.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SAME_SECONDS = 1.0  # within which a signal that comes again is the same request
DEADLINE = "save_before"
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)")

_is_own = False
_has_checkpoint = False  # to go on from, if a signal comes outside of training
_has_said_ignored = False


class RunStopped(SystemExit):
    """Training was ended from outside, by a signal of a scheduler or by save_before.

    If there is a checkpoint to go on from, it is like `sys.exit(75)` (EX_TEMPFAIL of sysexits.h: try again), so that a
    script that does not catch it ends with this status. Otherwise the status is 128 and the number of the signal, as a
    shell has it for a process that a signal has ended; 1 after save_before. reason: the name of the signal, or
    "save_before".
    """

    STATUS = 75

    def __init__(self, reason: str, *, has_checkpoint: bool = True) -> None:
        number = signal.Signals.__members__.get(reason)
        super().__init__(self.STATUS if has_checkpoint else 1 if number is None else 128 + number)
        self.reason = reason

    def __str__(self) -> str:
        if self.code == self.STATUS:
            return f"stopped by {self.reason}; the same run started again with resume goes on (status {self.code})"
        return f"stopped by {self.reason}; there is no checkpoint to go on from (status {self.code})"


def seconds_of(duration: float | str) -> float:
    """Return seconds, given as such or as [days-]hours:minutes:seconds, as Slurm writes limits of time. Raises
    ValueError for anything else."""
    if isinstance(duration, str) and (match := _DURATION.fullmatch(duration.strip())):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return float(duration)


def seconds_since_start() -> float:
    """Return the age of this process in seconds."""
    return max(time.time() - psutil.Process().create_time(), 0.0)


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Say that the program inside the block is the library's own, so that it may handle signals: outside of training
    that listens to them they raise RunStopped, which is told on stderr. Handlers that were there before stay."""
    global _is_own, _has_checkpoint
    before, stopped = _is_own, list[RunStopped]()

    def end(number: int, frame: FrameType | None) -> None:
        stopped.append(RunStopped(signal.Signals(number).name, has_checkpoint=_has_checkpoint))
        raise stopped[-1]

    with contextlib.ExitStack() as closing:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, end)
                    closing.callback(signal.signal, number, signal.SIG_DFL)
        _is_own, _has_checkpoint = True, before and _has_checkpoint
        try:
            yield
        finally:
            _is_own = before
            if stopped:
                print(f"{stopped[0]}; nothing was saved at the signal", file=sys.stderr, flush=True)


def is_own_process() -> bool:
    """Whether this process runs a program of the library."""
    return _is_own


def note_checkpoint() -> None:
    """Note that there is a checkpoint to go on from, for a signal that comes outside of training."""
    global _has_checkpoint
    _has_checkpoint = True


class Stop:
    """A request to stop, once there is one.

    handles_signals: whether signals of `SIGNALS` are requests. seconds: until the deadline; None = there is none.
    reason: the signal's name, or `save_before`; empty as long as nothing was requested.
    has_checkpoint: whether there is something to go on from; to be set by whoever saves.
    """

    def __init__(self, *, handles_signals: bool = False, seconds: float | None = None) -> None:
        self.reason, self.has_checkpoint = "", False
        self._handles_signals = handles_signals
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._asked_at = 0.0
        self._lock = threading.RLock()
        self._is_watching = False

    @property
    def is_wanted(self) -> bool:
        """Whether a stop can be requested at all."""
        return self._handles_signals or self._deadline is not None

    def without_interrupt(self) -> str:
        """Say how to end the run if this process ignores Ctrl-C; empty if it does not, or if that was said before."""
        global _has_said_ignored
        if _has_said_ignored or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            return ""
        _has_said_ignored = True
        how = "as Ctrl-C would" if self._handles_signals else "at once, unsaved (enable_jit_checkpoint=true saves)"
        return (
            "this process was started with Ctrl-C ignored, as by nohup or in the background of a script; "
            f"kill {os.getpid()} (SIGTERM) ends the run {how}"
        )

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop was requested; for threads that get no signals, and for a deadline that was
        over at the start."""
        if not self.reason and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = DEADLINE
        if self.reason:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Turn requests inside the block into a Ctrl-C, with all that this means: deferred where Ctrl-C is, passed on
        to ranks. If the block ends by it, RunStopped is raised. A second signal ends the process at once.

        Only the main thread gets signals; in another one the deadline counts where `check` is called.
        """
        try:
            if threading.current_thread() is threading.main_thread():
                with self._installed():
                    yield
            else:
                if self._handles_signals:
                    logger.warning("signals are not handled: training runs in a thread, and only the main one gets any")
                yield
        except KeyboardInterrupt:
            if not self.reason:
                raise
            raise RunStopped(self.reason, has_checkpoint=self.has_checkpoint) from None

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
        timer = None
        self._is_watching = True
        try:
            if self._handles_signals:
                for number in SIGNALS:
                    if before[number] not in (signal.SIG_IGN, None):
                        signal.signal(number, self._take)
            if self.is_wanted and before[signal.SIGINT] is signal.SIG_IGN:  # as in the background of a shell's script
                signal.signal(signal.SIGINT, self._interrupt_if_asked)
            left = 0.0 if self._deadline is None else self._deadline - time.monotonic()
            if left > 0:  # or the first `check` finds that it is over
                timer = threading.Timer(left, self._expire)
                timer.daemon = True
                timer.start()
            yield
        finally:
            with self._lock:
                self._is_watching = False
            if timer is not None:
                timer.cancel()
            if self.is_wanted:
                for number, handler in before.items():
                    if handler is not None:
                        signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.reason:
            self.reason, self._asked_at = signal.Signals(number).name, now
            signal.raise_signal(signal.SIGINT)
        elif now - self._asked_at > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _expire(self) -> None:
        main = threading.main_thread().ident
        with self._lock:
            if self._is_watching and not self.reason and main is not None:
                self.reason, self._asked_at = DEADLINE, time.monotonic()
                signal.pthread_kill(main, signal.SIGINT)

    def _interrupt_if_asked(self, number: int, frame: FrameType | None) -> None:
        """Ignore Ctrl-C as before, but not what this object sends."""
        if self.reason:
            raise KeyboardInterrupt
