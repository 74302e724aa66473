"""A program in the sandbox: the limits of its process, and its text run as `__main__`."""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import linecache
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import traceback
import types
from dataclasses import dataclass

from hybrid_rl.extras.sandbox import kernel

NAME = "<program>"
MAX_OPEN_FILES = 64
MAX_THREADS = 64
MAX_THREADS_OF_ALL = 1024
SEED = 0  # of `random`, at the start of every program


@dataclass(frozen=True)
class Limits:
    """Limits of one program. memory_bytes: of its address space. file_bytes: of all files that it writes. packages:
    folders to import from, besides the standard library."""

    timeout_seconds: float
    memory_bytes: int
    file_bytes: int
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Walls:
    """What confines programs here. apart: how the warden came to namespaces, "" = it has none. scratch: the folder of a
    private root that programs may write to, "" = there is no such root. landlock: its version, 0 = not used.
    missing: what cannot be had, and why."""

    apart: str = ""
    scratch: str = ""
    landlock: int = 0
    has_filter: bool = False
    missing: tuple[str, ...] = ()


def run_program(code: str, stdin: str, limits: Limits, walls: Walls, slot: int, output: int, warden: int) -> None:
    """Become the program, and end this process with it. stdin: what it can read. slot: number among programs that run
    at once. output: file descriptor of what it prints. warden: the process that this one must not outlive."""
    status = 1
    try:
        _confine(stdin, limits, walls, slot, output, warden)
        status = _run(code)
    except BaseException:
        # Not the program's own error: those are printed by _run.
        os.write(1, ("the sandbox failed: " + traceback.format_exc()).encode())
    finally:
        os._exit(status)


def _confine(stdin: str, limits: Limits, walls: Walls, slot: int, output: int, warden: int) -> None:
    os.setsid()
    os.dup2(_input(stdin), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1 << 16)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    user = kernel.FIRST_USER + slot % kernel.NUM_USERS if walls.apart == "as root" else os.geteuid()
    if walls.scratch:
        kernel.mount_scratch(walls.scratch, limits.file_bytes, user)
        sys.path.insert(0, walls.scratch)
    _limit(limits, walls)
    if walls.apart == "as root":
        kernel.become(user)
    elif walls.has_filter:
        kernel.give_up_capabilities()
    with contextlib.suppress(OSError):  # not on every system; the warden kills it too
        kernel.dump_no_memory()
        kernel.die_with_parent()  # which a change of the user undoes
    if os.getppid() != warden:
        os._exit(1)
    if walls.has_filter:
        kernel.filter_system_calls(may_write=bool(walls.scratch))


def _input(stdin: str) -> int:
    """Return a descriptor of a file, in memory or deleted, that holds the text."""
    if not stdin:
        return os.open("/dev/null", os.O_RDONLY)
    descriptor = os.memfd_create("stdin") if hasattr(os, "memfd_create") else _deleted_file()
    text = memoryview(stdin.encode(errors="replace"))
    while text:
        text = text[os.write(descriptor, text) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _deleted_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _limit(limits: Limits, walls: Walls) -> None:
    seconds = int(limits.timeout_seconds) + 2
    for name, most in (
        ("RLIMIT_AS", limits.memory_bytes),
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_FSIZE", limits.file_bytes),
        ("RLIMIT_NOFILE", MAX_OPEN_FILES),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MEMLOCK", 0),
        ("RLIMIT_MSGQUEUE", 0),
    ):
        number = getattr(resource, name, None)
        if number is not None:
            hard = resource.getrlimit(number)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(number, (most, most))
    if walls.apart:  # the user is this program's alone, or else that of all programs here
        most = MAX_THREADS if walls.apart == "as root" else MAX_THREADS_OF_ALL
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _run(code: str) -> int:
    """Run a program and return its exit status. What its last line is worth is printed, as in a notebook."""
    for name in [name for name in sys.modules if name.startswith("hybrid_rl")]:
        del sys.modules[name]  # none of its business
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = [NAME]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which `site` brings otherwise
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    random.seed(SEED)
    try:
        for part, mode in _parts(code):
            value = eval(compile(part, NAME, mode, dont_inherit=True), vars(main))
            if mode == "eval" and value is not None:
                print(repr(value))
        status = 0
    except SystemExit as error:
        status = _exit_status(error)
    except BaseException as error:
        status = 1
        _print_error(error)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for printed in (sys.stdout, sys.stderr):
        try:
            printed.flush()
        except (OSError, ValueError):  # the program closed it
            status = status or 1
    return status


def _parts(code: str) -> list[tuple[ast.Module | ast.Expression, str]]:
    tree = ast.parse(code, NAME)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return [(tree, "exec")]
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    return [(tree, "exec"), (ast.Expression(last.value), "eval")]


def _exit_status(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _print_error(error: BaseException) -> None:
    """Print an error of the program without the frames below it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # an exception that cannot be formatted, or no memory to do it
        os.write(2, type(error).__name__.encode())
