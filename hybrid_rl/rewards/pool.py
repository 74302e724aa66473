"""Reward functions in processes of their own, which can be killed.

Processes are started fresh (never forked: the trainer has threads) by running `calling.py`, not through
multiprocessing's spawn, which would import the user's main script again. Functions travel by cloudpickle.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import cloudpickle

from hybrid_rl.errors import ConfigError, RewardError
from hybrid_rl.rewards import calling
from hybrid_rl.rewards.calling import FORKED, CallOutcome, failed_call
from hybrid_rl.rewards.functions import RewardFunction, RewardInput
from hybrid_rl.rewards.isolation import Task, call_and_isolate

START_SECONDS = 300.0
"""Time for a process to load the functions (which may load models)."""
POLL_SECONDS = 0.2
JOIN_SECONDS = 5.0
END_SECONDS = 10.0
RETRIED = frozenset({"raised", "timeout", "died"})


def pickle_functions(functions: Sequence[RewardFunction]) -> bytes:
    """All functions as one message for a process. Raises ConfigError naming the one that cannot travel."""
    blobs = []
    for spec in functions:
        try:
            blobs.append((spec.is_async, cloudpickle.dumps(spec.function)))
        except Exception as error:
            raise ConfigError(
                f"reward function {spec.name!r} cannot be sent to a process ({type(error).__name__}: {error}); make "
                "what it captures picklable, create it inside the function, or set reward_processes=0"
            ) from error
    return pickle.dumps((sys.path, blobs))


def describe_exit(returncode: int) -> str:
    """`exit code 3` or `signal SIGSEGV`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """End a reward process with everything that it started, and reap it."""
    if process.poll() is None:
        process.terminate()  # it kills what is below it, which nobody else could find
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class RewardProcess:
    """One process that calls the functions, below one that ends it and all that functions start (`calling.keep`)."""

    def __init__(self) -> None:
        from hybrid_rl.controller import child_environment  # imports torch: see `on_own_device`

        self.connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-P", calling.__file__, str(theirs.fileno()), str(os.getpid())]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # Several processes with a thread per core each would fight for the cores.
                env={"OMP_NUM_THREADS": "1", **os.environ, **child_environment()},
            )
        finally:
            theirs.close()
        # Without close(), the processes go with the interpreter or with the last reference. In a fork of this process
        # they are nobody's children, which Popen takes for ended.
        self._finalizer = weakref.finalize(self, end_process, self.process)

    def load(self, functions: bytes) -> None:
        """Send the functions and wait until they are loaded. Raises RewardError with the process's traceback."""
        try:
            self.connection.send_bytes(functions)
            reply = self._receive(START_SECONDS)
            problem = f"not done after {START_SECONDS} s" if reply is None else pickle.loads(reply)
        except (EOFError, OSError):
            problem = f"it ended with {self._exit()}"
        if problem is not None:
            self.kill()
            raise RewardError(
                "a reward process cannot load the reward functions; they must be importable there, or be defined in "
                f"the script or notebook itself (or set reward_processes=0): {problem}"
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def _receive(self, timeout_seconds: float | None) -> bytes | None:
        """The next message; None when there is none in time. Raises EOFError or OSError when the process is gone."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            was_alive = self.alive
            if self.connection.poll(max(0.0, min(POLL_SECONDS, left))):
                return self.connection.recv_bytes()
            if not was_alive:  # something that it started holds the connection open
                raise EOFError
            if left <= 0:
                return None

    def _exit(self) -> str:
        """How the process ended, after its connection closed; it is reaped."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(POLL_SECONDS)  # for its own exit code rather than our signal
        self.kill()
        return describe_exit(self.process.wait())

    def call(self, request: bytes, timeout_seconds: float | None) -> CallOutcome:
        """Have one request answered. After "timeout" or "died" the process is gone."""
        try:
            self.connection.send_bytes(request)
            reply = self._receive(timeout_seconds)
        except (EOFError, OSError):
            return failed_call("died", f"the reward process ended during the call with {self._exit()}")
        if reply is None:
            self.kill()
            return failed_call("timeout", f"gave no answer within {timeout_seconds} s; its process was killed")
        return CallOutcome(*pickle.loads(reply))

    def kill(self) -> None:
        """Idempotent; the process is reaped."""
        self._finalizer()
        self.connection.close()


class ProcessPool:
    """`num_processes` reward processes, started at first use and kept; one thread here feeds each.

    A call is split over the processes. One that raises, runs past the limit or loses its process is repeated one
    sample at a time (on a fresh process where the old one is gone), so that only the offending samples fail.
    """

    def __init__(self, functions: Sequence[RewardFunction], num_processes: int, timeout_seconds: float | None) -> None:
        self.functions = pickle_functions(functions)
        self.num_processes = num_processes
        self.timeout_seconds = timeout_seconds
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.closed = False
        self.pid = os.getpid()
        self.threads: list[threading.Thread] = []
        self.processes: dict[int, RewardProcess] = {}

    def split(self, inputs: Sequence[RewardInput]) -> list[Sequence[RewardInput]]:
        """Contiguous chunks of nearly equal size, one per process at most."""
        num_chunks = min(self.num_processes, len(inputs))
        bounds = [len(inputs) * chunk // num_chunks for chunk in range(num_chunks + 1)]
        return [inputs[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]

    def start(self, task: Task) -> None:
        """Queue a task; returns at once."""
        if not self.threads:
            atexit.register(self.close)
        while len(self.threads) < self.num_processes:
            slot = len(self.threads)
            thread = threading.Thread(target=self._run, args=(slot,), name=f"reward process {slot}", daemon=True)
            self.threads.append(thread)
            thread.start()
        self.tasks.put(task)

    def close(self) -> None:
        """Kill and reap all processes; open tasks fail. Idempotent. In a forked child, which runs its parent's atexit
        too, nothing: processes and threads are the parent's."""
        if os.getpid() != self.pid:
            return
        with self.lock:
            self.closed = True
            processes = list(self.processes.values())
        for process in processes:
            end_process(process.process)
        atexit.unregister(self.close)
        for _ in self.threads:
            self.tasks.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)

    def _run(self, slot: int) -> None:
        while (task := self.tasks.get()) is not None:
            try:
                parts = call_and_isolate(partial(self._call, slot, task), task, RETRIED)
            except BaseException as error:
                task.fail(error)
            else:
                task.done(parts)
                del parts
            del task
        if process := self.processes.get(slot):
            process.kill()

    def _call(self, slot: int, task: Task, inputs: Sequence[RewardInput]) -> CallOutcome:
        request = self._request(task, inputs)
        outcome = self._process(slot).call(request, self.timeout_seconds)
        if self.closed:
            raise RewardError("the reward runner was closed before scoring finished")
        if outcome.failure is not None and outcome.failure[0] == FORKED:
            raise RewardError(
                f"reward function {task.function.name!r}, or one that was called before it, forked its process, and "
                "the child came back from the function too, so that there were two answers: end the child inside of "
                "it, with os._exit()"
            )
        return outcome

    @staticmethod
    def _request(task: Task, inputs: Sequence[RewardInput]) -> bytes:
        arguments: dict[str, Any] = task.arguments(inputs)
        try:
            return cloudpickle.dumps((task.index, arguments, len(inputs), task.function.log_names))
        except Exception as error:
            raise RewardError(
                f"the arguments of reward function {task.function.name!r} ({', '.join(sorted(arguments))}) cannot be "
                f"sent to a process: {type(error).__name__}: {error}; set reward_processes=0"
            ) from error

    def _process(self, slot: int) -> RewardProcess:
        """The living process of a slot, started when there is none."""
        process = self.processes.get(slot)
        if process is not None and process.alive:
            return process
        with self.lock:
            if self.closed:
                raise RewardError("the reward runner was closed before scoring finished")
            if process is not None:
                process.kill()
            process = self.processes[slot] = RewardProcess()
        try:
            process.load(self.functions)
        except RewardError:
            if self.closed:
                raise RewardError("the reward runner was closed before scoring finished") from None
            raise
        return process
