"""The process that starts programs, as seen from the process that asks for them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.errors import SandboxError
from hybrid_rl.extras.sandbox.program import Walls
from hybrid_rl.extras.sandbox.warden import receive, send
from hybrid_rl.process.threads import start_thread

START_SECONDS = 60.0
# No site packages, no folder of a script, none of the variables of this process.
_START = (
    "import sys; sys.path.append(sys.argv[1]); from hybrid_rl.extras.sandbox.warden import main; "
    "sys.path.pop(); main(int(sys.argv[2]))"
)
_ROOT = str(Path(__file__).resolve().parents[3])
# Strings hash alike in every program, so that a repeated program prints the same.
_VARIABLES = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class ProgramResult:
    """What a program came to.

    output: what it printed (both streams, and what its last line is worth), perhaps with its middle left out.
    end: "" if it ended by itself, else "time", "output" (it printed too much) or "cancelled". code: its exit status,
    negative = the signal that killed it. seconds: from start to end.
    """

    output: str
    end: str
    code: int
    seconds: float


class WardenConnection:
    """The process that starts programs (`warden.py`), and a thread that takes its answers."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._own, other = socket.socketpair()
        self._lock = threading.Lock()
        self._open: dict[int, Future[ProgramResult]] = {}
        self._number = 0
        self.is_gone = False
        folder = tempfile.mkdtemp(prefix="hybrid-rl-sandbox-")
        try:
            with other, tempfile.TemporaryFile() as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-s", "-P", "-c", _START, _ROOT, str(other.fileno())],
                    env=_VARIABLES,
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    cwd="/",
                    start_new_session=True,  # Ctrl-C is not for programs
                )
                other.close()
                self._own.settimeout(START_SECONDS)
                try:
                    send(self._own, {**asked, "folder": folder})
                    walls = receive(self._own)
                except (EOFError, OSError) as error:
                    self._process.kill()
                    self._process.wait()
                    errors.seek(0)
                    said = errors.read().decode(errors="replace").strip()[-1000:] or repr(error)
                    raise SandboxError(f"the process of the sandbox did not start: {said}") from None
        except BaseException:
            self._own.close()
            raise
        finally:
            os.rmdir(folder)
        self._own.settimeout(None)
        self.walls = Walls(**{**walls, "missing": tuple(walls["missing"])})
        self._finalizer = weakref.finalize(self, _end, self._own, self._process, os.getpid())
        start_thread("sandbox", _taking(weakref.ref(self), self._own), lambda: None)

    def start(self, code: str, stdin: str = "", seconds: float | None = None) -> Future[ProgramResult]:
        """Let a program run. To cancel the future ends it. stdin: what it can read. seconds: instead of the limit of
        all."""
        future: Future[ProgramResult] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._open[number] = future
            try:
                message = {"number": number, "code": code, "stdin": stdin}
                send(self._own, message | ({"seconds": seconds} if seconds else {}))
            except (OSError, UnicodeError) as error:
                self._open.pop(number)
                future.set_exception(SandboxError(f"the sandbox died: {error}"))
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        return future

    def _cancel(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)
            with contextlib.suppress(OSError):
                send(self._own, {"cancel": number})

    def take(self, message: dict[str, Any] | None) -> None:
        """Take an answer; None: there will be no more."""
        if message is None:
            with self._lock:
                self.is_gone = True
                left = list(self._open.values())
                self._open.clear()
            for future in left:
                if future.set_running_or_notify_cancel():
                    future.set_exception(SandboxError("the sandbox died while a program ran; the next call starts it"))
            return
        with self._lock:
            futures = [self._open.pop(number) for number in (message["number"],) if number in self._open]
        for future in futures:
            if not future.set_running_or_notify_cancel():
                continue
            gap = f"\n[{message['cut_bytes']} bytes left out]\n" if message["cut_bytes"] else ""
            output = message["head"] + gap + message["tail"]
            future.set_result(ProgramResult(output, message["end"], message["code"], message["seconds"]))

    def close(self) -> None:
        """End the process and all programs."""
        self._finalizer()


def _taking(warden: weakref.ref[WardenConnection], connection: socket.socket) -> Any:
    def body() -> None:
        while True:
            try:
                message = receive(connection)
            except (EOFError, OSError, ValueError):
                message = None
            owner = warden()
            if owner is None:
                return
            owner.take(message)
            if message is None:
                return
            del owner

    return body


def _end(connection: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process of a sandbox; its programs end with it. owner: the process that this is left to; a fork of it
    that ends must not."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    connection.close()
