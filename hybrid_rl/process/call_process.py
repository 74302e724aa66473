"""Processes that run calls of the user's functions, and that can be killed.

Each runs `call_main.py`. Functions travel by cloudpickle, so lambdas, closures and what a notebook defines work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.process.call_main import LENGTH_BYTES

MAIN = Path(__file__).with_name("call_main.py")
START_SECONDS = 300.0
"""Time for a process to load the functions (which may load models)."""
END_SECONDS = 10.0


def packed(blobs: Iterable[tuple[str, bool, bytes]]) -> bytes:
    """Pack functions as one message for a process. blobs: name, whether it is async, and the function as bytes."""
    return pickle.dumps((sys.path, list(blobs)))


def describe_exit(returncode: int) -> str:
    """Describe an exit status: `exit code 3` or `signal SIGSEGV`."""
    names = {int(number): number.name for number in signal.Signals}
    return f"exit code {returncode}" if returncode >= 0 else f"signal {names.get(-returncode, -returncode)}"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process with everything that it started, and reap it."""
    if process.poll() is None:
        process.terminate()  # it kills everything below it, which only it can find
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class ProcessEndedError(Exception):
    """A process ended while it was asked; the message says how. is_killed: whether by a SIGKILL, as of the kernel that
    is out of memory."""

    def __init__(self, how: str, *, is_killed: bool = False) -> None:
        super().__init__(how)
        self.is_killed = is_killed


class CallProcess:
    """One process that calls functions, below one that ends it and all that functions start (`call_main`).

    calling: the file of the module that says how functions are called. environment: variables besides this process's
    own. Made and used on one event loop.
    """

    def __init__(self, calling: Path, environment: Mapping[str, str]) -> None:
        self._calling, self._environment = calling, environment
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._begin()

    def _begin(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(MAIN), str(self._calling), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # Several processes with a thread per core each would fight for the cores.
                env={"OMP_NUM_THREADS": "1", **os.environ, **self._environment},
            )
        # Without close(), the process ends with the interpreter or with the last reference. A fork of the trainer is
        # not its parent, so Popen there takes it for ended.
        self._end = weakref.finalize(self, end_process, self.process)

    async def load(self, functions: bytes) -> str | None:
        """Send the functions (`packed`) and wait until they are loaded. Returns what went wrong, None if nothing. A
        process that ends meanwhile may have been killed from outside, so another one takes its place, once."""
        for is_last in (False, True):
            self.streams = await asyncio.open_unix_connection(sock=self.socket)
            try:
                problem: str | None = pickle.loads(await self._ask(functions, START_SECONDS))
                return problem
            except TimeoutError:
                return f"not done after {START_SECONDS} s"
            except (EOFError, OSError):
                problem = f"it ended with {self._exit()}"
            if not is_last:
                self._begin()
        return problem

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    async def call(self, request: bytes, timeout_seconds: float | None) -> tuple[Any, ...]:
        """Have one request answered by an outcome, as a tuple. Raises TimeoutError or ProcessEndedError; then the
        process is gone."""
        try:
            outcome: tuple[Any, ...] = pickle.loads(await self._ask(request, timeout_seconds))
        except TimeoutError:
            self.kill()
            raise
        except (EOFError, OSError) as error:
            how = self._exit()
            raise ProcessEndedError(how, is_killed=self.process.returncode == -signal.SIGKILL) from error
        return outcome

    async def _ask(self, message: bytes, timeout_seconds: float | None) -> bytes:
        """Exchange one message for another. Raises TimeoutError, or EOFError or OSError if the process is gone."""
        assert self.streams is not None
        reader, writer = self.streams
        async with asyncio.timeout(timeout_seconds):
            writer.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
            await writer.drain()
            return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big"))

    def _exit(self) -> str:
        """Describe how the process ended, after it closed its connection, and reap it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)  # for its own exit code rather than our signal
        self.kill()
        return describe_exit(self.process.wait())

    def kill(self) -> None:
        """End the process with everything that it started. Idempotent; the process is reaped."""
        self._end()
        if self.streams is not None:
            self.streams[1].close()
