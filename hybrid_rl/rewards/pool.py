"""Reward functions in separate processes, which can be killed.

Each process runs `process_main.py`. Functions travel by cloudpickle, so lambdas, closures and what a notebook defines
work. Ready-made pools were tried; `pebble.ProcessPool` 5.2, which has a time limit per task and replaces what it kills,
breaks four promises that tests/unit/rewards/test_pool.py holds:

- with spawn and forkserver it imports the user's script again, so that a script needs a `__main__` guard (and fork is
  not safe below a trainer, which has threads and perhaps a CUDA context);
- a process that a function started outlives the kill of its worker;
- a worker in a call outlives a trainer that was killed;
- if a function forks and the child comes back, the child's answer may be taken for the function's.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from hybrid_rl.errors import ConfigError, RewardError
from hybrid_rl.rewards.calling import FORKED, LENGTH_BYTES, CallOutcome, failed_call
from hybrid_rl.rewards.functions import RewardFunction

MAIN = Path(__file__).with_name("process_main.py")
START_SECONDS = 300.0
"""Time for a process to load the functions (which may load models)."""
END_SECONDS = 10.0


def pickle_functions(functions: Sequence[RewardFunction]) -> bytes:
    """Pack all functions as one message for a process. Raises ConfigError naming the one that cannot be pickled."""
    blobs = []
    for spec in functions:
        try:
            blobs.append((spec.name, spec.is_async, cloudpickle.dumps(spec.function)))
        except Exception as error:
            raise ConfigError(
                f"reward function {spec.name!r} cannot be sent to a process ({type(error).__name__}: {error}); make "
                "what it captures picklable, create it inside the function, or set reward_processes=0"
            ) from error
    return pickle.dumps((sys.path, blobs))


def describe_exit(returncode: int) -> str:
    """Describe an exit status: `exit code 3` or `signal SIGSEGV`."""
    names = {int(number): number.name for number in signal.Signals}
    return f"exit code {returncode}" if returncode >= 0 else f"signal {names.get(-returncode, -returncode)}"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a reward process with everything that it started, and reap it."""
    if process.poll() is None:
        process.terminate()  # it kills everything below it, which only it can find
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class RewardProcess:
    """One process that calls the functions, below one that ends it and all that functions start (`process_main`).

    Made and used on one event loop.
    """

    def __init__(self) -> None:
        from hybrid_rl.controller import child_environment  # imports torch: see `start_thread`

        self.socket, theirs = socket.socketpair()
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(MAIN), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # Several processes with a thread per core each would fight for the cores.
                env={"OMP_NUM_THREADS": "1", **os.environ, **child_environment()},
            )
        # Without close(), the process ends with the interpreter or with the last reference. A fork of the trainer is
        # not its parent, so Popen there takes it for ended.
        self._end = weakref.finalize(self, end_process, self.process)

    async def load(self, functions: bytes) -> None:
        """Send the functions and wait until they are loaded. Raises RewardError with the process's traceback."""
        self.streams = await asyncio.open_unix_connection(sock=self.socket)
        try:
            problem = pickle.loads(await self._ask(functions, START_SECONDS))
        except TimeoutError:
            problem = f"not done after {START_SECONDS} s"
        except (EOFError, OSError):
            problem = f"it ended with {self._exit()}"
        if problem is not None:
            raise RewardError(
                "a reward process cannot load the reward functions; they must be importable there, or be defined in "
                f"the script or notebook itself (or set reward_processes=0): {problem}"
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

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

    async def call(self, request: bytes, timeout_seconds: float | None) -> CallOutcome:
        """Have one request answered. After "timeout" or "died" the process is gone."""
        try:
            return CallOutcome(*pickle.loads(await self._ask(request, timeout_seconds)))
        except TimeoutError:
            self.kill()
            return failed_call("timeout", f"gave no answer within {timeout_seconds} s; its process was killed")
        except (EOFError, OSError):
            return failed_call("died", f"the reward process ended during the call with {self._exit()}")

    def kill(self) -> None:
        """End the process with everything that it started. Idempotent; the process is reaped."""
        self._end()
        if self.streams is not None:
            self.streams[1].close()


class ProcessCaller:
    """At most `num_processes` reward processes, started when first needed and kept."""

    def __init__(self, functions: Sequence[RewardFunction], num_processes: int, timeout_seconds: float | None) -> None:
        self.functions = pickle_functions(functions)
        self.timeout_seconds = timeout_seconds
        self.num_processes = num_processes
        self.idle: list[RewardProcess] = []
        self._slots = asyncio.Semaphore(num_processes)

    def slot(self, spec: RewardFunction) -> asyncio.Semaphore:
        """Return what is held during a call."""
        return self._slots

    async def call(self, spec: RewardFunction, arguments: Callable[[], dict[str, Any]], count: int) -> CallOutcome:
        """Call a function once, over `count` samples. Raises RewardError if functions or arguments cannot travel."""
        given = arguments()
        try:
            request = cloudpickle.dumps((spec.name, given, count, spec.log_names))
        except Exception as error:
            raise RewardError(
                f"the arguments of reward function {spec.name!r} ({', '.join(sorted(given))}) cannot be "
                f"sent to a process: {type(error).__name__}: {error}; set reward_processes=0"
            ) from error
        while self.idle and not self.idle[-1].is_alive:
            self.idle.pop().kill()
        process = self.idle.pop() if self.idle else RewardProcess()
        try:
            if process.streams is None:
                await process.load(self.functions)
            outcome = await process.call(request, self.timeout_seconds)
        except BaseException:  # a cancellation too: the runner is closing
            process.kill()
            raise
        if process.is_alive:
            self.idle.append(process)
        else:
            process.kill()
        if outcome.failure is not None and outcome.failure[0] == FORKED:
            raise RewardError(
                f"reward function {spec.name!r}, or one that was called before it, forked its process, and "
                "the child came back from the function too, so that there were two answers: end the child inside the "
                "function, with os._exit()"
            )
        return outcome

    def close(self) -> None:
        """Kill and reap all processes. Those in a call end with its cancellation."""
        for process in self.idle:
            process.kill()
