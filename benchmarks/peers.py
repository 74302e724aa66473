"""The parent of a comparison: its sides in processes of their own, and the environment that TRL runs in."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.report import progress
from benchmarks.side import Job

ROOT = Path(__file__).resolve().parents[1]
TRL_ENVIRONMENT = ROOT / ".venv-trl"
TRL_SERIES = "1.16"
SHARED_VERSIONS = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "numpy", "peft")
TAIL_CHARACTERS = 4000
PATIENCE_SECONDS = 5


class SideFailed(RuntimeError):
    """A side ended or could not start; the message has the end of its stderr."""


class Side:
    """A library in a process of its own, which does a step when it is told to.

    Its process group is killed when the block ends, however it ends.
    """

    def __init__(self, name: str, python: str | Path, module: str, job: Job) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the side)
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            cwd=ROOT,
            env=_environment(job.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._send(dataclasses.asdict(job))
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Wait until the library is loaded; `ready` then holds its versions and what its imports take."""
        self.ready = self._receive()

    def step(self) -> dict[str, Any]:
        """One training step."""
        self._send({"command": "step"})
        return self._receive()

    def follow(self, **plan: Any) -> dict[str, Any]:
        """One rollout of agents by a plan."""
        self._send(plan)
        return self._receive()

    def rollout(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """One rollout; the lengths of its completions."""
        self._send({"prompts": [list(ids) for ids in prompts]})
        return self._receive()["lengths"]

    def save(self, path: Path) -> None:
        """Write the present weights, a state dict of torch, to a file."""
        self._send({"command": "save", "path": str(path)})
        self._receive()

    def _send(self, values: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(values) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        return json.loads(line)

    def _fail(self) -> NoReturn:
        status = self._process.wait()
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace")[-TAIL_CHARACTERS:]
        raise SideFailed(f"the side {self.name!r} ended with status {status}; the end of its stderr:\n{tail}")

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(PATIENCE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._errors.close()


def _environment(threads: int) -> dict[str, str]:
    fixed = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    fixed |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    fixed |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "MPLBACKEND": "Agg"}
    return {**os.environ, **fixed}


def ours(job: Job) -> Side:
    """This library's side."""
    return Side("hybrid_rl", sys.executable, "benchmarks.side_ours", job)


def trl(job: Job, python: Path) -> Side:
    """TRL's side, in the environment of that interpreter."""
    return Side("trl", python, "benchmarks.side_trl", job)


def trl_agents(job: Job, python: Path) -> Side:
    """TRL's side of a comparison of agents."""
    return Side("trl", python, "benchmarks.side_trl_agents", job)


def check_versions(ours: Side, peer: Side) -> None:
    """Refuse to compare a TRL of another series, or sides on different versions of torch or transformers."""
    versions = peer.ready["versions"]
    if not versions["trl"].startswith(f"{TRL_SERIES}."):
        raise SideFailed(f"trl {versions['trl']} is installed; this benchmark was written for {TRL_SERIES}")
    for name, version in ours.ready["versions"].items():
        if _public(versions[name]) != _public(version):
            raise SideFailed(f"{name} is {version} on our side and {versions[name]} on TRL's; install the same")


def _public(version: str) -> str:
    return version.partition("+")[0]


def trl_python(given: Path | None) -> Path:
    """Return the interpreter of an environment with TRL, made now if none is given and none was made before.

    pip gets the arguments in the environment variable PIP_ARGS. Raises SideFailed if it fails.
    """
    if given is not None:
        if not given.exists():
            raise SideFailed(f"--trl-python {given} does not exist")
        return given.absolute()  # not resolved: a link in a virtual environment leads out of it
    requirements = [f"trl=={TRL_SERIES}.*"]
    requirements += [f"{name}=={_public(importlib.metadata.version(name))}" for name in SHARED_VERSIONS]
    python, stamp = TRL_ENVIRONMENT / "bin" / "python", TRL_ENVIRONMENT / ".installed"
    if not stamp.exists() or stamp.read_text().split() != requirements:
        progress(f"installing {', '.join(requirements)} into {TRL_ENVIRONMENT.relative_to(ROOT)}")
        _run([sys.executable, "-m", "venv", "--clear", str(TRL_ENVIRONMENT)])
        options = shlex.split(os.environ.get("PIP_ARGS", ""))
        _run([str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *options, *requirements])
        stamp.write_text("\n".join(requirements))
    return python


def _run(arguments: list[str]) -> None:
    # pip prints its progress to stdout, which is reserved for the line of JSON.
    status = subprocess.run(arguments, stdout=sys.stderr, check=False).returncode
    if status:
        raise SideFailed(f"`{shlex.join(arguments[1:])}` ended with status {status}; its messages are above")


def run_script(main: Callable[[], None]) -> None:
    """Run a script: a failure of a side is a message and status 1, Ctrl-C and SIGTERM leave no processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except SideFailed as error:
        progress(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
