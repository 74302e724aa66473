"""The Python tool: programs that the policy writes are run in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from hybrid_rl.agents.sandbox.program import Limits, Walls
from hybrid_rl.agents.sandbox.warden import receive, send
from hybrid_rl.controller.processes import own_cores
from hybrid_rl.errors import AgentError, ConfigError
from hybrid_rl.process.threads import start_thread

logger = logging.getLogger("hybrid_rl")

MIB = 2**20
LEAST_MEMORY_BYTES = 32 * MIB  # with less Python hardly runs, and not even that the sandbox is safe can be found out
MOST_OUTPUT_BYTES = 64 * MIB  # a program that prints more is ended
START_SECONDS = 60.0
# No site packages, no folder of a script, none of the variables of this process.
_START = (
    "import sys; sys.path.append(sys.argv[1]); from hybrid_rl.agents.sandbox.warden import main; "
    "sys.path.pop(); main(int(sys.argv[2]))"
)
_ROOT = str(Path(__file__).resolve().parents[2])
# Strings hash alike in every program, so that a repeated program prints the same.
_VARIABLES = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}

# Tries to get out, in the ways that the sandbox must bar. Prints what was barred.
_PROBE = """
import ctypes, json, os, socket
def barred(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
def trace():
    if ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0) < 0:
        raise OSError
def write():
    with open("/etc/hybrid-rl-probe", "w"):
        pass
    os.remove("/etc/hybrid-rl-probe")
def reach():
    socket.socket().connect(("127.0.0.1", 9))
def send():
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9))
print(json.dumps({
    "network": barred(send) and barred(lambda: socket.socket(socket.AF_UNIX).bind("\\0probe")),
    "files": barred(lambda: open("/etc/passwd")) and barred(lambda: open("/proc/1/environ")) and barred(write),
    "processes": barred(fork) and barred(trace) and barred(lambda: os.kill(os.getppid(), 0)),
}))
"""
_BARRED = ("network", "files", "processes")


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


@dataclass(frozen=True)
class SandboxStrength:
    """How well programs are confined on this machine, by trying. network, files, processes: whether a program is kept
    from any network; from files of others, and from writing outside of its own folder; from starting, tracing and
    signalling processes. means: what that is done with. missing: what could not be had, and why."""

    network: bool
    files: bool
    processes: bool
    means: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def is_strict(self) -> bool:
        """Whether a program is kept from all three."""
        return self.network and self.files and self.processes

    def __str__(self) -> str:
        kept = [name for name in _BARRED if getattr(self, name)]
        open_to = [name for name in _BARRED if not getattr(self, name)]
        text = f"keeps programs from {', '.join(kept) or 'nothing'} by {', '.join(self.means) or 'nothing'}"
        text += f"; open: {', '.join(open_to)}" if open_to else ""
        return text + (f"; not to be had here: {', '.join(self.missing)}" if self.missing else "")


class PythonTool:
    """Runs Python programs of the policy in a sandbox; its method `python` is the tool: `tools=[sandbox.python]`. A
    `with` block closes it.

    A program sees the standard library and a folder of its own, in memory, which ends with it; nothing is kept from one
    call to the next. It has no network, starts no processes (threads it may), and cannot read files of others or the
    variables of this process. What it prints is the answer, with the value of its last line, as in a notebook. `random`
    begins with the same seed in every program, so that a program repeated prints the same.

    timeout_seconds: longest time of a program; waiting for a free core does not count. memory_bytes: of its address
    space, at least 32 MiB, of which about 30 MB are Python's own. output_chars: most characters of an answer; of longer
    ones the middle is left out. file_bytes: all files of a program together. packages: importable packages of this
    environment that programs may use, such as ("numpy",); the folder that holds them becomes readable. max_running:
    programs that run at once, None = one for each core. strict: refuse to run where a program cannot be kept from
    network, files and processes; False = run with what this machine offers, and warn once.

    Raises ConfigError for limits that are too small and for packages that are not installed; when first used,
    AgentError if the sandbox cannot be made.
    """

    def __init__(
        self,
        timeout_seconds: float = 5.0,
        memory_bytes: int = 512 * MIB,
        output_chars: int = 4000,
        *,
        file_bytes: int = 16 * MIB,
        packages: Sequence[str] = (),
        max_running: int | None = None,
        strict: bool = True,
    ) -> None:
        for name, value in (
            ("timeout_seconds", timeout_seconds),
            ("memory_bytes", memory_bytes),
            ("output_chars", output_chars),
            ("file_bytes", file_bytes),
            ("max_running", 1 if max_running is None else max_running),
        ):
            if not value > 0:
                raise ConfigError(f"PythonTool({name}={value!r}): give a number above 0")
        if memory_bytes < LEAST_MEMORY_BYTES:
            raise ConfigError(
                f"PythonTool(memory_bytes={memory_bytes!r}): Python itself needs about 30 MB; give at least "
                f"{LEAST_MEMORY_BYTES} bytes ({LEAST_MEMORY_BYTES // MIB} * 2**20)"
            )
        self.timeout_seconds, self.memory_bytes, self.output_chars = timeout_seconds, memory_bytes, output_chars
        self.file_bytes, self.packages, self.strict = file_bytes, tuple(packages), strict
        self.max_running = max_running
        self._layers = {"namespaces": True, "filter": True, "landlock": True}
        self._folders = _folders_of(self.packages)
        self._warden: _Warden | None = None
        self._lock = threading.Lock()

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept from one program to the next.

        Args:
            code: The program. Print what you want to see.
        """
        return self._text(await asyncio.wrap_future(self._start(code)))

    def run(self, code: str) -> ProgramResult:
        """Run a program and wait for its end. Raises AgentError if the sandbox cannot be made, or dies."""
        return self._start(code).result()

    def strength(self) -> SandboxStrength:
        """Return how well programs are confined here. Raises AgentError if the sandbox cannot be made."""
        return self._ready().strength

    def close(self) -> None:
        """End all programs, and the process that starts them. Idempotent; a later call starts another."""
        with self._lock:
            warden, self._warden = self._warden, None
        if warden is not None:
            warden.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_warden": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_lock": threading.Lock()})

    def _start(self, code: str) -> Future[ProgramResult]:
        return self._ready().start(code)

    def _ready(self) -> _Warden:
        with self._lock:
            if self._warden is None or self._warden.is_gone:
                self._warden = self._begin()
            return self._warden

    def _begin(self) -> _Warden:
        limits = Limits(self.timeout_seconds, self.memory_bytes, self.file_bytes, self._folders)
        warden = _Warden(
            {
                **self._layers,
                "limits": asdict(limits),
                "loaded": self.packages,
                "max_running": self.max_running or own_cores(),
                "max_output_bytes": 4 * self.output_chars,  # of the longest characters
                "most_bytes": MOST_OUTPUT_BYTES,
            }
        )
        try:
            warden.strength = strength = _measure(warden)
        except BaseException:
            warden.close()
            raise
        if self.strict and not strength.is_strict:
            warden.close()
            raise AgentError(
                f"the sandbox of PythonTool is not safe on this machine: it {strength}. Allow user namespaces or "
                "Landlock, and seccomp (Linux 5.13 or later; containers: their seccomp profile), or use "
                "PythonTool(strict=False) where no harm can be done"
            )
        if not strength.is_strict:
            _warn_once(str(strength))
        return warden

    def _text(self, result: ProgramResult) -> str:
        """Return a result as the policy gets it."""
        text = result.output
        if len(text) > self.output_chars:
            half = self.output_chars // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
        why = {
            "time": f"ended: it ran for more than {self.timeout_seconds:g} s",
            "output": f"ended: it printed more than {MOST_OUTPUT_BYTES // MIB} MB",
            "cancelled": "ended: cancelled",
            "": f"ended by signal {-result.code}" if result.code < 0 else "",
        }[result.end]
        parts = [text.rstrip("\n"), f"[{why}]" if why else ""]
        return "\n".join(part for part in parts if part) or "(no output)"


@cache
def sandbox_strength() -> SandboxStrength | str:
    """Return how well PythonTool confines programs on this machine, or why it cannot run at all."""
    tool = PythonTool(strict=False)
    try:
        warden = tool._begin()
    except AgentError as error:
        return str(error)
    warden.close()
    return warden.strength


@cache
def _warn_once(strength: str) -> None:
    logger.warning("PythonTool(strict=False): the sandbox is weak on this machine: it %s", strength)


def _folders_of(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the folders to import packages from. Raises ConfigError for one that is not installed."""
    folders: dict[str, None] = {}
    for name in packages:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
        if not places or not os.path.isabs(places[0]):
            raise ConfigError(f"PythonTool(packages=...) has {name!r}, which is not an installed top-level package")
        folders[os.path.realpath(os.path.dirname(places[0]))] = None
    return tuple(folders)


def _measure(warden: _Warden) -> SandboxStrength:
    """Let a program try to get out."""
    result = warden.start(_PROBE, START_SECONDS).result()
    try:
        barred = json.loads(result.output)
    except ValueError:
        raise AgentError(
            f"the sandbox of PythonTool does not work on this machine: a program of its own ended with {result.code} "
            f"{result.end} and printed {result.output.strip()[-500:]!r}"
        ) from None
    walls = warden.walls
    means = {
        f"namespaces ({walls.apart})": walls.apart,
        "a private root": walls.scratch,
        "seccomp": walls.has_filter,
        f"Landlock {walls.landlock}": walls.landlock,
    }
    used = tuple(name for name, is_used in means.items() if is_used)
    return SandboxStrength(**{name: bool(barred[name]) for name in _BARRED}, means=used, missing=walls.missing)


class _Warden:
    """The process that starts programs (`sandbox/warden.py`), and a thread that takes its answers."""

    strength: SandboxStrength

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
                    raise AgentError(f"the process of the sandbox did not start: {said}") from None
        except BaseException:
            self._own.close()
            raise
        finally:
            os.rmdir(folder)
        self._own.settimeout(None)
        self.walls = Walls(**{**walls, "missing": tuple(walls["missing"])})
        self._finalizer = weakref.finalize(self, _end, self._own, self._process, os.getpid())
        start_thread("sandbox", _taking(weakref.ref(self), self._own), lambda: None)

    def start(self, code: str, seconds: float | None = None) -> Future[ProgramResult]:
        """Let a program run. To cancel the future ends it. seconds: instead of the limit of all."""
        future: Future[ProgramResult] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._open[number] = future
            try:
                send(self._own, {"number": number, "code": code} | ({"seconds": seconds} if seconds else {}))
            except (OSError, UnicodeError) as error:
                self._open.pop(number)
                future.set_exception(AgentError(f"the sandbox died: {error}"))
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
                    future.set_exception(AgentError("the sandbox died while a program ran; the next call starts it"))
            return
        with self._lock:
            found = [self._open.pop(number) for number in (message["number"],) if number in self._open]
        for future in found:
            if not future.set_running_or_notify_cancel():
                continue
            gap = f"\n[{message['cut_bytes']} bytes left out]\n" if message["cut_bytes"] else ""
            output = message["head"] + gap + message["tail"]
            future.set_result(ProgramResult(output, message["end"], message["code"], message["seconds"]))

    def close(self) -> None:
        """End the process and all programs."""
        self._finalizer()


def _taking(warden: weakref.ref[_Warden], connection: socket.socket) -> Any:
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
