"""The main program of a process that runs calls.

`call_process.py` runs this file by its path, so that a process starts in milliseconds, needs no `__main__` guard in the
user's script and imports neither torch nor the rest of this package by itself. Therefore it imports nothing of this
package but a module that says how functions are called, by its path too, and outcomes travel as plain tuples. Such a
module imports nothing of this package and has:

- call_sync(function, *rest) and call_async(function, *rest): one call; they return an outcome whatever it raises;
- failed_call(reason, detail): an outcome without a value; its field `failure` is (reason, detail);
- user_traceback(error): text.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

import cloudpickle

FORKED = "forked"  # the reason of a call after which a second process came back from the function
LENGTH_BYTES = 8  # of the length before each message between the two sides, big endian
PARENT_CHECK_SECONDS = 0.5
# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def send(connection: socket.socket, message: bytes) -> None:
    """Write one message with its length before it."""
    connection.sendall(len(message).to_bytes(LENGTH_BYTES, "big") + message)


def receive(stream: BinaryIO) -> bytes:
    """Read one message. Raises EOFError if the other side is gone."""
    size = int.from_bytes(stream.read(LENGTH_BYTES), "big")
    message = stream.read(size)
    if not size or len(message) < size:
        raise EOFError
    return message


def kill_own_group(*_: object) -> None:
    """End this process and every process that functions started from it and that is still in its group."""
    os.killpg(0, signal.SIGKILL)


def end_with(parent_pid: int) -> None:
    """Arrange for this process to get a SIGTERM when its parent ends, even if the parent is killed.

    The kernel's signal also interrupts functions that hold the GIL for long but check for signals (a runaway regular
    expression); the watching thread serves systems without that signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def keep(worker: int, parent_pid: int, connection: socket.socket) -> NoReturn:
    """Wait until the worker, a child of this process, has ended, or until this process is told to end (SIGTERM) or has
    lost its parent; then end everything that the worker started, and end as the worker did. SIGTERM and SIGCHLD are
    blocked.

    On Linux, processes below this one become its children when their own parents end, whatever group or session they
    are in, so none is lost. Elsewhere only those that stay in the worker's group are found.
    """
    import psutil  # here, so that the worker does not wait for it

    end_with(parent_pid)
    status: int | None = None
    while status is None and signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGCHLD:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == worker else status
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    spared: set[int] = set()  # processes of other users, by sudo
    while left := {child.pid for child in psutil.Process().children()} - spared:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                spared.add(pid)
        if left - spared:
            ended = os.waitpid(-1, 0)
            status = ended[1] if ended[0] == worker else status
    with contextlib.suppress(OSError):  # the trainer may be gone
        connection.shutdown(socket.SHUT_RDWR)  # for the trainer to notice, even if a process that is left holds it open
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1] if status is None else status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL cannot be given a handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def load_calling(path: str) -> ModuleType:
    """Load the module that says how functions are called."""
    spec = importlib.util.spec_from_file_location("_calling", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["_calling"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(
    calling: ModuleType,
    functions: dict[str, tuple[bool, Callable[..., Any]]],
    request: bytes,
    runner: asyncio.Runner,
) -> Any:
    """Serve one request: the name of the function, and what `calling` needs besides."""
    try:
        name, *rest = pickle.loads(request)
    except BaseException as error:
        detail = f"the arguments cannot be loaded in a process that runs calls:\n{calling.user_traceback(error)}"
        return calling.failed_call("raised", detail)
    is_async, function = functions[name]
    return runner.run(calling.call_async(function, *rest)) if is_async else calling.call_sync(function, *rest)


def serve(connection: socket.socket, calling: ModuleType) -> None:
    """Load the functions, report that, then answer one request at a time until the other side is gone.

    A process that a function forked and that came back from it is ended here, as it would answer the call a second time
    and take the next ones. The trainer is told (`FORKED`), unless the child asked to end.
    """
    stream = connection.makefile("rb")
    search_path, blobs = pickle.loads(receive(stream))
    sys.path[:] = search_path
    try:
        functions = {name: (is_async, pickle.loads(blob)) for name, is_async, blob in blobs}
    except BaseException as error:
        return send(connection, pickle.dumps(calling.user_traceback(error) or repr(error)))
    send(connection, pickle.dumps(None))
    server, (notice, tell) = os.getpid(), os.pipe()
    os.set_blocking(notice, False)
    with asyncio.Runner() as runner:  # one loop for the whole life: clients that functions keep stay usable
        while True:
            outcome = answer(calling, functions, receive(stream), runner)
            if os.getpid() != server:
                if outcome.failure is None or outcome.failure[0] != "ended":
                    os.write(tell, b"!")
                os._exit(0)
            with contextlib.suppress(BlockingIOError):
                os.read(notice, 1)
                outcome = calling.failed_call(FORKED, "")
            send(connection, cloudpickle.dumps(tuple(outcome)))


def main(calling: str, connection: socket.socket, parent_pid: int) -> None:
    """Serve the trainer (process parent_pid) from a child of this process, which ends all that functions start."""
    keeper, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if worker := os.fork():
        keep(worker, parent_pid, connection)
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, kill_own_group)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    end_with(keeper)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection, load_calling(calling))


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
