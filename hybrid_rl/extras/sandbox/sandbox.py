"""A sandbox: programs run one by one in processes of their own, kept from network, files and other processes."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

from hybrid_rl.errors import ConfigError, SandboxError
from hybrid_rl.extras.sandbox.connection import START_SECONDS, ProgramResult, WardenConnection
from hybrid_rl.extras.sandbox.program import Limits
from hybrid_rl.process.cores import own_cores

logger = logging.getLogger("hybrid_rl")

MIB = 2**20
LEAST_MEMORY_BYTES = 32 * MIB  # with less Python hardly runs, and not even that the sandbox is safe can be found out
MOST_OUTPUT_BYTES = 64 * MIB  # a program that prints more is ended

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


class Sandbox:
    """Runs Python programs of the policy, each in a process of its own. A `with` block closes it.

    A program sees the standard library and a folder of its own, in memory, which ends with it; nothing is kept from one
    program to the next. It has no network, starts no processes (threads it may), and cannot read files of others or the
    variables of this process. `random` begins with the same seed in every program, so that a program repeated prints
    the same.

    owner: whose limits these are, for messages. timeout_seconds: longest time of a program; waiting for a free core
    does not count. memory_bytes: of its address space, at least 32 MiB, of which about 30 MB are Python's own.
    output_bytes: kept of what a program prints; of more the middle is left out. file_bytes: all files of a program
    together. packages: importable packages of this environment that programs may use, such as ("numpy",); the folder
    that holds them becomes readable. max_running: programs that run at once, None = one for each core. strict: refuse
    to run where a program cannot be kept from network, files and processes; False = run with what this machine offers,
    and warn once.

    Raises ConfigError for limits that are too small and for packages that are not installed; when first used,
    SandboxError if the sandbox cannot be made. A copy by pickle starts a process of its own.
    """

    def __init__(
        self,
        owner: str,
        *,
        timeout_seconds: float,
        memory_bytes: int,
        output_bytes: int,
        file_bytes: int,
        packages: Sequence[str] = (),
        max_running: int | None = None,
        strict: bool = True,
    ) -> None:
        for name, value in (
            ("timeout_seconds", timeout_seconds),
            ("memory_bytes", memory_bytes),
            ("file_bytes", file_bytes),
            ("max_running", 1 if max_running is None else max_running),
        ):
            if not value > 0:
                raise ConfigError(f"{owner}({name}={value!r}): give a number above 0")
        if memory_bytes < LEAST_MEMORY_BYTES:
            raise ConfigError(
                f"{owner}(memory_bytes={memory_bytes!r}): Python itself needs about 30 MB; give at least "
                f"{LEAST_MEMORY_BYTES} bytes ({LEAST_MEMORY_BYTES // MIB} * 2**20)"
            )
        self._owner, self._strict, self._max_running = owner, strict, max_running
        self._output_bytes, self._packages = output_bytes, tuple(packages)
        self._limits = Limits(timeout_seconds, memory_bytes, file_bytes, _folders_of(owner, self._packages))
        self._layers = {"namespaces": True, "filter": True, "landlock": True}
        self._warden: WardenConnection | None = None
        self._strength: SandboxStrength | None = None
        self._lock = threading.Lock()

    def start(self, code: str, stdin: str = "") -> Future[ProgramResult]:
        """Start a program, whose standard input is `stdin`. To cancel the future ends it. Raises SandboxError if the
        sandbox cannot be made; the future raises it if the sandbox dies."""
        return self._ready().start(code, stdin)

    def run(self, code: str, stdin: str = "") -> ProgramResult:
        """Run a program and wait for its end. Raises SandboxError if the sandbox cannot be made, or dies."""
        return self.start(code, stdin).result()

    def strength(self) -> SandboxStrength:
        """Return how well programs are confined here. Raises SandboxError if the sandbox cannot be made."""
        self._ready()
        assert self._strength is not None
        return self._strength

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

    def _ready(self) -> WardenConnection:
        with self._lock:
            if self._warden is None or self._warden.is_gone:
                self._warden = self._begin()
            return self._warden

    def _begin(self) -> WardenConnection:
        warden = WardenConnection(
            {
                **self._layers,
                "limits": asdict(self._limits),
                "loaded": self._packages,
                "max_running": self._max_running or own_cores(),
                "max_output_bytes": self._output_bytes,
                "most_bytes": MOST_OUTPUT_BYTES,
            }
        )
        try:
            self._strength = strength = _measure(warden)
        except BaseException:
            warden.close()
            raise
        if self._strict and not strength.is_strict:
            warden.close()
            raise SandboxError(
                f"the sandbox of {self._owner} is not safe on this machine: it {strength}. Allow user namespaces or "
                "Landlock, and seccomp (Linux 5.13 or later; containers: their seccomp profile), or use "
                f"{self._owner}(strict=False) where no harm can be done"
            )
        if not strength.is_strict:
            _warn_once(self._owner, str(strength))
        return warden


@cache
def sandbox_strength() -> SandboxStrength | str:
    """Return how well programs are confined on this machine, or why the sandbox cannot run at all."""
    limits = {"timeout_seconds": 5.0, "memory_bytes": 512 * MIB, "file_bytes": MIB, "output_bytes": 4000}
    try:
        with Sandbox("Sandbox", **limits, strict=False) as sandbox:  # type: ignore[arg-type]
            return sandbox.strength()
    except SandboxError as error:
        return str(error)


@cache
def _warn_once(owner: str, strength: str) -> None:
    logger.warning("%s(strict=False): the sandbox is weak on this machine: it %s", owner, strength)


def _folders_of(owner: str, packages: Sequence[str]) -> tuple[str, ...]:
    """Return the folders to import packages from. Raises ConfigError for one that is not installed."""
    folders: dict[str, None] = {}
    for name in packages:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
        if not places or not os.path.isabs(places[0]):
            raise ConfigError(f"{owner}(packages=...) has {name!r}, which is not an installed top-level package")
        folders[os.path.realpath(os.path.dirname(places[0]))] = None
    return tuple(folders)


def _measure(warden: WardenConnection) -> SandboxStrength:
    """Let a program try to get out."""
    result = warden.start(_PROBE, seconds=START_SECONDS).result()
    try:
        barred = json.loads(result.output)
    except ValueError:
        raise SandboxError(
            f"the sandbox does not work on this machine: a program of its own ended with {result.code} "
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
