"""Resources of a started cluster: its folder, its thread, its signal handler. All of them are removed at its end."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

LOCK = "lock"
# A socket's path may have 107 characters, of which a cluster's take 83 after the parent folder, with the longest pid.
MAX_PARENT_LENGTH = 24
CONNECT_SECONDS = 10.0

_is_held, _is_due = False, False  # see `sigterm_waits`


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder that is removed when the block ends, or, if the process was killed, by the next call. parent:
    where; None = in the system's folder for such files."""
    parent = parent or Path(tempfile.gettempdir())
    if len(str(parent)) > MAX_PARENT_LENGTH:
        parent = Path("/tmp")
    for left in parent.glob(f"{prefix}*"):
        _remove_if_left(left)
    # Under a name that no other process looks for until it is locked: it would seem to be left.
    path = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    with (path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = path.rename(path.with_name(path.name.removeprefix(".")))
        pid = os.getpid()
        try:
            yield path
        finally:
            _end_in(pid, lambda: shutil.rmtree(path, ignore_errors=True))


def shared_memory() -> Path | None:
    """Return the folder of this machine whose files are memory; None if it has none that can be written to."""
    path = Path("/dev/shm")
    return path if os.access(path, os.W_OK | os.X_OK) else None


def _remove_if_left(folder: Path) -> None:
    """Remove the folder of a process that is gone: the kernel has let go of its lock."""
    with contextlib.suppress(OSError), (folder / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def alive_thread(start: Callable[[], None]) -> Iterator[None]:
    """Run `start` in a thread that lives as long as the block: in the main thread itself if this is the main thread.

    Raises what `start` raised.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        yield
        return
    is_started, is_over = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            start()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            errors.append(error)
        finally:
            is_started.set()
        is_over.wait()

    threading.Thread(target=run, name="ray-cluster", daemon=True).start()
    is_started.wait()
    try:
        if errors:
            raise errors[0]
        yield
    finally:
        is_over.set()


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Let a SIGTERM inside the block end the program by SystemExit, so that all is closed. A handler of the user stays.

    Only the main thread may set handlers; in other threads the block simply runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def sigterm_waits() -> Iterator[None]:
    """Have a SIGTERM that would end the program come after the block, which must be short: an exception in the middle
    of a call of Ray's ends the program with Ray's status, or aborts it."""
    global _is_held, _is_due
    if _is_held or threading.current_thread() is not threading.main_thread():
        yield
        return
    _is_held = True
    try:
        yield
    finally:
        _is_held, is_due, _is_due = False, _is_due, False
        if is_due:
            _exit(signal.SIGTERM, None)


def _exit(number: int, frame: FrameType | None) -> None:
    global _is_due
    if _is_held:
        _is_due = True
    else:
        raise SystemExit(128 + number)


def at_end(owner: object, end: Callable[..., Any], *args: Any) -> weakref.finalize:
    """Call `end` when the owner is dropped, or at the end of the program before the libraries imported so far take
    themselves down; calling the result ends it at once. It happens once, and in this process only."""
    finalizer = weakref.finalize(owner, _end_in, os.getpid(), end, *args)
    # weakref's own hook may run after that of a library which `end` needs.
    finalizer.atexit = False
    atexit.register(finalizer)
    return finalizer


def _end_in(pid: int, end: Callable[..., Any], *args: Any) -> None:
    """Do nothing in a forked child: the resource belongs to its parent."""
    if os.getpid() == pid:
        end(*args)


def check_reachable(address: str) -> bool:
    """Raise OSError if nothing listens at "host:port". Returns whether that was checked: other forms are not."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and "/" not in address):
        return False
    socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    return True
