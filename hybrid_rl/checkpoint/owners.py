"""Ownership of a folder: identity of a process beyond its pid, which may be used again, and a lock that records it.

Clocks are never compared: a process is identified by its start as its own kernel counted it, and one that cannot be
inspected from here is watched for signs of life.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from hybrid_rl.errors import ConfigError, HybridRLError, StorageError

logger = logging.getLogger("hybrid_rl")

LOCK_FILE = ".lock"
BEAT_SECONDS = 5.0
WATCH_SECONDS = 20.0
ATTEMPTS = 100
Standing = Literal["alive", "gone", "unknown"]


@dataclass(frozen=True)
class Owner:
    """A process. kernel: boot id of its kernel; namespace: that of its pid (a container has its own); started: its
    start time as counted by the kernel."""

    host: str
    kernel: str
    namespace: int
    pid: int
    started: int

    @classmethod
    def here(cls) -> Owner:
        """Describe this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _kernel(), _namespace(), pid, _started(pid) or 0)

    def standing(self) -> Standing:
        """Whether the process is running; unknown for processes of other machines and containers."""
        here = Owner.here()
        if (self.kernel, self.namespace) != (here.kernel, here.namespace):
            return "unknown"
        return "alive" if _started(self.pid) == self.started else "gone"

    @property
    def token(self) -> str:
        """All fields as one word, for file names; `of_token` reads it."""
        return f"{self.pid}-{self.started}-{self.namespace}-{self.kernel}-{self.host}"

    @classmethod
    def of_token(cls, token: str) -> Owner | None:
        """Return the owner that a word describes; None for a word of another form."""
        parts = token.split("-", 4)
        if len(parts) != 5 or not all(part.isdigit() for part in parts[:3]):
            return None
        pid, started, namespace = map(int, parts[:3])
        return cls(parts[4], parts[3], namespace, pid, started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:  # not Linux
        return socket.gethostname().replace("-", "")


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started(pid: int) -> int | None:
    """Return the start time of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, IndexError, ValueError):
        return None
    try:
        return int(psutil.Process(pid).create_time() * 100)
    except psutil.Error:
        return None


class FolderLock:
    """A lock on a folder, held until `release` or until this process ends in any way. A forked child has only a copy,
    which it cannot release.

    The kernel's lock on a file excludes all processes of the machine, and on most shared file systems those of other
    machines. If that lock does not work, the file names the owner, and a sign of life every few seconds shows that it
    is still running.

    Raises ConfigError, with the owner's name, while another process holds it; StorageError if the folder cannot be
    written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / LOCK_FILE
        self._owner = Owner.here()
        self._descriptor = self._acquire()
        self._is_released, self._guard = threading.Event(), threading.Lock()
        threading.Thread(target=self._beat, name="folder lock", daemon=True).start()

    def check(self) -> None:
        """Raise HybridRLError if another process has taken the folder, which must then be left alone. A lock file that
        was deleted, perhaps with the folder, is made again."""
        if self._is_released.is_set() or self._is_ours():
            return
        descriptor: int | None = None
        if self._path.exists():
            descriptor = self._taken_back()
            if descriptor is None:
                raise HybridRLError(
                    f"{self.folder} was taken over by {_owner_in(self._path) or 'another process'}: this run must not "
                    "write there any more; end one of the two (trainer.save(another folder) keeps the weights of this "
                    "one)"
                )
        elif self.folder.is_dir():
            descriptor = self._acquire()
        if descriptor is not None:
            with self._guard:
                os.close(self._descriptor)
                self._descriptor = descriptor

    def _taken_back(self) -> int | None:
        """Return the file, locked, of a folder that was away for a while (a disk that was not mounted) and still has
        our name; None if somebody else has the folder. Raises OSError."""
        if _owner_in(self._path) != self._owner:
            return None
        descriptor = os.open(self._path, os.O_RDWR)
        if _lock(descriptor) and _is_at(descriptor, self._path):
            return descriptor
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._is_released.is_set():
            return
        self._is_released.set()
        if os.getpid() == self._owner.pid and self._is_ours():
            self._path.unlink(missing_ok=True)
        with self._guard:
            os.close(self._descriptor)

    def _is_ours(self) -> bool:
        return _is_at(self._descriptor, self._path) and _owner_in(self._path) == self._owner

    def _beat(self) -> None:
        while not self._is_released.wait(BEAT_SECONDS):
            with self._guard, contextlib.suppress(OSError):  # of a network that is down for a while
                if not self._is_released.is_set():
                    os.utime(self._descriptor)

    def _acquire(self) -> int:
        for _ in range(ATTEMPTS):
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
                if self._take(descriptor):
                    return descriptor
            except OSError as error:
                raise StorageError(f"cannot lock {self.folder}: {error}; use a writable folder") from error
            os.close(descriptor)
        raise ConfigError(f"{self._path} is taken and released again and again; check which programs start runs there")

    def _take(self, descriptor: int) -> bool:
        """Write our name into the file; return False if the file must be opened again. Raises ConfigError."""
        try:
            has_lock = _lock(descriptor)
            owner = _owner_in(self._path)
            if not _is_at(descriptor, self._path):
                return False
            if owner is None and has_lock is False:
                time.sleep(0.05)  # another process is about to write to it
                return False
            if owner is not None and self._is_held(owner, has_lock):
                raise ConfigError(
                    f"{self.folder} is in use by {owner}"
                    + (" (this process)" if owner == self._owner else "")
                    + f"; wait for it, end it, or choose another run_name. If it has ended, delete {self._path}"
                )
            if has_lock is False:  # inherited by a child of a process that is gone
                self._path.unlink(missing_ok=True)
                return False
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self._owner)).encode(), 0)
            return True
        except BaseException:
            os.close(descriptor)
            raise

    def _is_held(self, owner: Owner, has_lock: bool | None) -> bool:
        """Whether the owner still holds the folder. has_lock: whether the kernel's lock is ours; None = unsupported."""
        standing = owner.standing()
        if standing != "unknown":
            return standing == "alive"
        if has_lock is False:
            return True
        if has_lock and owner.kernel == self._owner.kernel:
            return False  # in another container, but under the same kernel, whose lock decides
        logger.warning(
            "%s was in use by %s, which cannot be inspected from here: watching it for %g s",
            *(self.folder, owner, WATCH_SECONDS),
        )
        return self._sees_life()

    def _sees_life(self) -> bool:
        before, end = _change_time(self._path), time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, WATCH_SECONDS / 10))
            if _change_time(self._path) != before:
                return True
        return False


def _lock(descriptor: int) -> bool | None:
    """Try the kernel's lock on an open file: whether it is ours now; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _owner_in(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _change_time(path: Path) -> int:
    """Return the change time of a file by its own file system's clock. It is opened, so that network file systems
    update it."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0
