"""Processes of Ray's workers, and drivers, as forks of a server that has imported what all of them need.

Importing takes five seconds of a core per process, a fork some milliseconds. What comes then is its own: the fork of a
worker runs the file that its raylet asks for, that of a driver its script. Tests of how processes start, and of what
ends with them, do without.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.distributed.ranks import FROZEN, PRELOADED
from tests.support.libraries.ray_names import own_start_script

# What Ray imports, and what runs a rank. Not Ray itself: imported, it takes its settings from the environment, and each
# fork has one of its own.
PRELOADED_FOR_RAY = (
    "google.protobuf.json_format",
    "jsonschema",
    "pyarrow.json",
    "pydantic",
    "requests",
    "hybrid_rl.controller.remote",
    "hybrid_rl.controller.server",
)
ROOT = Path(__file__).parents[2]
CONTEXT = "--serialized-runtime-env-context="


class Forks:
    """The server, and whether workers come from it. folder: of its socket; a short path, as of all sockets."""

    def __init__(self, folder: Path) -> None:
        self._open, self._closed = folder / "open", folder / "closed"
        self._server: subprocess.Popen[bytes] | None = None

    def environment(self) -> dict[str, str]:
        """What `setup_worker.py` reads; Ray must have it from its start."""
        own = own_start_script()
        return {"HYBRID_RL_TEST_FORKS": str(self._open), "HYBRID_RL_TEST_SETUP_WORKER": str(own)}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Workers that start meanwhile are forks."""
        if self._server is None:
            command = [sys.executable, "-m", "tests.distributed.forks", str(self._closed)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self._server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
            assert self._server.stdout is not None
            assert self._server.stdout.readline() == b"listening\n", "the server of forks did not start"
        self._closed.rename(self._open)
        yield
        self._open.rename(self._closed)

    def close(self) -> None:
        """End the server. Its forks have ended with their groups."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()


def serve(path: str) -> socket.socket:
    """Fork for each caller; returns in the fork, which has taken over what makes the caller's process, with the
    connection to it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("listening", flush=True)
        while True:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not select.select([listener], [], [], 0.1)[0]:
                continue
            caller, _ = listener.accept()
            header, streams, _, _ = socket.recv_fds(caller, 8, 3)
            call = json.loads(caller.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL))
            if os.fork() == 0:
                break
            # The fork alone holds the connection now: when it ends, in whatever way, the caller ends too.
            caller.close()
            for stream in streams:
                os.close(stream)
    os.setpgid(0, 0)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["environment"])
    sys.argv = call["arguments"]
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    return caller


def _end_with(caller: socket.socket) -> None:
    """A caller that is killed takes its worker along."""
    caller.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def work(caller: socket.socket) -> None:
    """What Ray's `setup_worker.py` does with its arguments, but for the new process; a driver has none of these. The
    caller is told with which status the file ends."""
    options = [argument for argument in sys.argv if argument.startswith((CONTEXT, "--language="))]
    sys.argv = [argument for argument in sys.argv if argument not in options]
    for option in options:
        if option.startswith(CONTEXT):
            context: dict[str, Any] = json.loads(option.removeprefix(CONTEXT))
            os.environ.update(context.get("env_vars") or {})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        caller.sendall(bytes([status & 255]))


if __name__ == "__main__":
    for name in (*PRELOADED, *PRELOADED_FOR_RAY, FROZEN):
        importlib.import_module(name)
    work(serve(sys.argv[1]))
