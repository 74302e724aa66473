"""Programs as forks of a server that has torch, transformers and the library imported.

Importing takes five seconds of a core per process, a fork and its end a third of one. What a fork runs is a program,
from its first line to the interpreter's own end: arguments and environment are the caller's, who gets output and exit
status. Only what libraries read of the environment as they are imported comes too late; Triton and vLLM are not yet.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from tests.support.libraries.python_names import end_at_once
from tests.support.plugins.no_pictures import DRAWING, nothing

ROOT = Path(__file__).parents[3]
PRELOADED = (
    *("tests.support.tiny", "hybrid_rl.run.trainer", "hybrid_rl.workers.hybrid", "hybrid_rl.engines.inplace.engine"),
    *(name.rpartition(".")[0] for name in DRAWING),  # in which each fork puts something else in their place
)


class Forked:
    """The server. It starts with the first program, and runs one at a time."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        *arguments: str,
        folder: Path = ROOT,
        environment: Mapping[str, str],
        limit_seconds: float = 240.0,
        draws: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """What `python *arguments` does: a path, `-m` and a module or `-c` and a text, then the program's own. Past the
        limit it is killed, and TimeoutExpired raised. draws: whether its runs draw their pictures."""
        server = self._started()
        assert server.stdin is not None and server.stdout is not None
        with tempfile.TemporaryDirectory() as name:
            streams = [os.devnull, f"{name}/out", f"{name}/err"]
            call = {"arguments": arguments, "folder": str(folder), "environment": {**environment}, "streams": streams}
            call["draws"] = draws
            server.stdin.write(json.dumps(call) + "\n")
            server.stdin.flush()
            if not select.select([server.stdout], [], [], limit_seconds)[0]:
                self.close()
                raise subprocess.TimeoutExpired(arguments, limit_seconds)
            status = json.loads(server.stdout.readline())
            out, err = (Path(stream).read_text(errors="replace") for stream in streams[1:])
        return subprocess.CompletedProcess(arguments, status, out, err)

    def close(self) -> None:
        """End the server, and the program that it runs."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None

    def _started(self) -> subprocess.Popen[str]:
        if self._server is None:
            command = [sys.executable, "-P", __file__]
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._server = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
        return self._server


def serve() -> list[str]:
    """Fork for each call; returns in the fork, which has taken on what a process has of its caller."""
    for line in sys.stdin:
        call = json.loads(line)
        pid = os.fork()
        if pid == 0:
            break
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    else:
        end_at_once(0)
    for target, path in enumerate(call["streams"]):
        stream = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(call["folder"])
    os.environ.clear()
    os.environ.update(call["environment"])
    paths = call["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*filter(None, paths), *sys.path])
    for name in () if call["draws"] else DRAWING:
        mock.patch(name, nothing).start()
    return call["arguments"]


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a fork that collected what is here, at its end if not before, would copy all of its memory
    sys.argv = serve()
    if sys.argv[0] == "-m":
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
