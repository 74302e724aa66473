"""The warden: a small process that starts programs in the sandbox, watches them, and ends them.

It is started by `connection.py` with an empty environment and neither torch nor site packages, enters what the kernel
offers once, and then forks itself for each program, which takes milliseconds. It ends when the process that started it
does. Messages are JSON with a length before them.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hybrid_rl.extras.sandbox import kernel
from hybrid_rl.extras.sandbox.program import Limits, Walls, run_program

LENGTH_BYTES = 8
READ_BYTES = 1 << 16
# Modules that programs find loaded already.
LOADED = (
    *("bisect", "calendar", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "hashlib"),
    *("heapq", "itertools", "math", "operator", "pprint", "queue", "random", "re", "statistics", "string", "textwrap"),
    "typing",
)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Write one message."""
    text = json.dumps(message).encode()
    connection.sendall(len(text).to_bytes(LENGTH_BYTES, "big") + text)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Read one message. Raises EOFError if the other side is gone."""
    size = int.from_bytes(_read(connection, LENGTH_BYTES), "big")
    message: dict[str, Any] = json.loads(_read(connection, size))
    return message


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError
        data += part
    return bytes(data)


@dataclass(eq=False)
class Running:
    """One program that runs, until the deadline. pipe: what it prints. head, tail: what is kept of that; num_bytes: all
    of it."""

    number: int
    pid: int
    slot: int
    pipe: int
    started: float
    deadline: float
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0
    end: str = ""


class Warden:
    """Starts programs on request. max_running: at once; the others wait. max_output_bytes: kept of each."""

    def __init__(self, connection: socket.socket, limits: Limits, walls: Walls, asked: dict[str, Any]) -> None:
        self._connection, self._limits, self._walls = connection, limits, walls
        self._half = int(asked["max_output_bytes"]) // 2
        self._most_bytes = int(asked["most_bytes"])
        self._slots = list(range(int(asked["max_running"])))
        self._waiting: deque[tuple[int, str, str, float]] = deque()
        self._running: dict[int, Running] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, wakes = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the other side is gone. What runs then is killed by the end of this process."""
        while self._attend():
            self._end_late()
            self._reap()
            while self._waiting and self._slots:
                self._start(*self._waiting.popleft())

    def _attend(self) -> bool:
        """Take what has come. Returns whether the other side is still there."""
        for key, _ in self._selector.select(self._wait_seconds()):
            if key.fileobj is self._connection:
                try:
                    self._take(receive(self._connection))
                except EOFError:
                    return False
            elif key.fileobj == self._wake:
                with suppress(BlockingIOError):
                    os.read(self._wake, READ_BYTES)
            elif key.data.pid in self._running:
                self._read_output(key.data)
        return True

    def _forget_others(self) -> None:
        """Drop, in the process of a program, what the others are and have printed: it could be found there."""
        for running in self._running.values():
            running.head[:] = bytes(len(running.head))
            running.tail[:] = bytes(len(running.tail))
        self._waiting.clear()
        self._running.clear()
        self._selector.close()
        self._selector = selectors.DefaultSelector()

    def kill_all(self) -> None:
        """Kill all programs."""
        for running in self._running.values():
            self._kill(running)

    def _wait_seconds(self) -> float | None:
        deadlines = [running.deadline for running in self._running.values() if not running.end]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _take(self, message: dict[str, Any]) -> None:
        if "code" in message:
            seconds = float(message.get("seconds", self._limits.timeout_seconds))
            self._waiting.append((int(message["number"]), str(message["code"]), str(message["stdin"]), seconds))
            return
        number = message["cancel"]
        self._waiting = deque(program for program in self._waiting if program[0] != number)
        for running in self._running.values():
            if running.number == number:
                self._stop(running, "cancelled")

    def _start(self, number: int, code: str, stdin: str, seconds: float) -> None:
        slot = self._slots.pop()
        pipe, output = os.pipe()
        warden = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self._forget_others()
            run_program(code, stdin, self._limits, self._walls, slot, output, warden)
        os.close(output)
        os.set_blocking(pipe, False)
        now = time.monotonic()
        running = self._running[pid] = Running(number, pid, slot, pipe, now, now + seconds)
        self._selector.register(pipe, selectors.EVENT_READ, running)

    def _read_output(self, running: Running) -> bool:
        """Read what a program has printed. Returns whether there may be more."""
        try:
            output = os.read(running.pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not output:
            with suppress(KeyError):
                self._selector.unregister(running.pipe)
            return False
        running.num_bytes += len(output)
        room = self._half - len(running.head)
        running.head += output[:room] if room > 0 else b""
        running.tail += output[max(room, 0) :]
        del running.tail[: max(0, len(running.tail) - self._half)]
        if running.num_bytes > self._most_bytes:
            self._stop(running, "output")
        return True

    def _end_late(self) -> None:
        now = time.monotonic()
        for running in self._running.values():
            if now >= running.deadline:
                self._stop(running, "time")

    def _stop(self, running: Running, end: str) -> None:
        if not running.end:
            running.end = end
            self._kill(running)

    def _kill(self, running: Running) -> None:
        for kill in (os.killpg, os.kill):  # it may not have come to a group of its own yet
            with suppress(ProcessLookupError, PermissionError):
                kill(running.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._running:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            running = self._running.pop(pid, None)
            if running is None:  # without a filter, programs can start others
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            while self._read_output(running):
                pass
            with suppress(KeyError):
                self._selector.unregister(running.pipe)
            os.close(running.pipe)
            self._slots.append(running.slot)
            self._answer(running, os.waitstatus_to_exitcode(status))

    def _answer(self, running: Running, code: int) -> None:
        cut = running.num_bytes - len(running.head) - len(running.tail)
        send(
            self._connection,
            {
                "number": running.number,
                "head": running.head.decode("utf-8", "replace"),
                "tail": running.tail.decode("utf-8", "replace"),
                "cut_bytes": cut,
                "end": running.end,
                "code": code,
                "seconds": time.monotonic() - running.started,
            },
        )


def build_walls(asked: dict[str, Any], limits: Limits) -> Walls:
    """Enter what this machine offers, of what is asked for. Returns in the process that programs are forked from: if
    namespaces can be had, a child of this one."""
    shown = shown_paths(limits.packages)
    walls, missing = Walls(), []
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory is short, programs go first
    if asked["namespaces"]:
        try:
            walls = replace(walls, apart=kernel.live_apart())
        except OSError as error:
            missing.append(f"namespaces ({error})")
    if walls.apart:
        _go_on_in_child()
        try:
            kernel.enter_private_root(asked["folder"], shown)
            walls = replace(walls, scratch=kernel.scratch_beside(shown))
        except OSError as error:
            missing.append(f"a private root ({error})")
    if asked["filter"]:
        walls, missing = _try_filter(walls, missing)
    if not walls.scratch and asked["landlock"]:
        try:
            kernel.read_only_these(shown)
            walls = replace(walls, landlock=kernel.landlock_version())
        except OSError as error:
            missing.append(f"Landlock ({error})")
    return replace(walls, missing=tuple(missing))


def _try_filter(walls: Walls, missing: list[str]) -> tuple[Walls, list[str]]:
    """Try the filter in a child."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kernel.filter_system_calls(may_write=False)
        except OSError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writes)
    reason = os.read(reads, READ_BYTES).decode()
    os.close(reads)
    return replace(walls, has_filter=not reason), [*missing, f"seccomp ({reason})"] if reason else missing


def _go_on_in_child() -> None:
    """Fork: the child is the first process of the new namespace, whose end ends all others in it. This process waits
    for it, and passes on its end."""
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()
        return
    os.closerange(0, 1 << 10)
    _, status = os.waitpid(pid, 0)
    os._exit(abs(os.waitstatus_to_exitcode(status)))


def shown_paths(packages: Sequence[str]) -> list[str]:
    """Return the files and folders that programs may read: Python, its libraries, and packages."""
    libraries = ["/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache"]
    own = [os.path.realpath(path) for path in (*sys.path, os.path.join(sys.base_prefix, "lib"), *packages)]
    paths = [path for path in dict.fromkeys([*libraries, *own]) if os.path.exists(path)]
    # A folder brings what is in it.
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def main(descriptor: int) -> None:
    """Serve programs to the process at the other end of a socket."""
    sys.path[:] = map(os.path.realpath, sys.path)  # links on the way are not there in a private root
    connection = socket.socket(fileno=descriptor)
    asked = receive(connection)
    limits = Limits(**{**asked["limits"], "packages": tuple(asked["limits"]["packages"])})
    walls = build_walls(asked, limits)
    sys.path += limits.packages
    for name in (*LOADED, *asked["loaded"]):
        __import__(name)
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()  # so that programs share these objects' memory with this process
    send(connection, asdict(walls))
    warden = Warden(connection, limits, walls, asked)
    try:
        warden.run()
    finally:
        warden.kill_all()
