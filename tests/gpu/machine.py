"""The machine that `make gpu` runs on: what it lacks, what it is, processes with a time limit, memory on its device."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

# import name -> what it is for. Without one of these nothing here runs.
REQUIRED = {
    "torch": "a build with CUDA",
    "transformers": "the models",
    "tokenizers": "the models",
    "numpy": "the tests",
    "omegaconf": "the configuration",
    "rich": "the progress line",
    "safetensors": "checkpoints",
    "cloudpickle": "reward processes",
    "psutil": "memory probes",
    "pytest": "the tests",
}
# Without these less is run, which the report says.
OPTIONAL = {
    "triton": "the decode and sampling kernels and the fused head",
    "pytest_timeout": "limits of single tests",
    "setuptools": "building csrc",
    "flash_attn": "attention=flash_attn",
    "ray": "ranks in processes of their own",
    "vllm": "rollout.engine=vllm",
}
MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """How a process ended. status: passed, failed or timeout; output: stdout and stderr together, in order.
    peak_bytes: most memory in use on device 0, by all processes, as nvidia-smi saw it four times a second; None if it
    cannot be asked."""

    status: str
    seconds: float
    output: str
    peak_bytes: int | None = None


class DeviceMemory:
    """Watches the memory in use on device 0 while a block runs, from outside: what any process takes counts."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> DeviceMemory:
        query = ["--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=250"]
        if shutil.which("nvidia-smi"):
            self._output = tempfile.TemporaryFile("w+")
            self._process = subprocess.Popen(["nvidia-smi", *query], stdout=self._output, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._output.seek(0)
        seen = [int(line) for line in self._output.read().split() if line.isdigit()]
        self._output.close()
        self.peak_bytes = max(seen) * MIB if seen else None


def run_limited(command: list[str], root: Path, limit_seconds: float, environment: Mapping[str, str]) -> Outcome:
    """Run a command in `root`; past the limit it and everything it started is killed, what it printed is kept."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as output, DeviceMemory() as memory:
        process = subprocess.Popen(
            command, cwd=root, env=dict(environment), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "passed" if process.wait(limit_seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Outcome(status, time.monotonic() - start, text, memory.peak_bytes)


def child_environment(root: Path) -> dict[str, str]:
    """This process's environment, with the repository first on the import path."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def missing(names: Iterable[str]) -> list[str]:
    """Those of the import names that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def obstacles() -> list[str]:
    """Why nothing can be run here, one line each; empty if everything can."""
    absent = ", ".join(f"{name} ({REQUIRED[name]})" for name in missing(REQUIRED))
    lines = []
    if absent:
        lines.append(
            f"{sys.executable} cannot import {absent}; name another Python (GPU_PYTHON=...), install them, or name "
            f"their folder in PYTHONPATH"
        )
    if "torch" not in missing(["torch"]):
        import torch  # takes seconds, and may not be there

        if torch.version.cuda is None:
            lines.append(f"torch {torch.__version__} is built without CUDA")
        elif not torch.cuda.is_available():
            lines.append(f"torch {torch.__version__} finds no CUDA device (see nvidia-smi)")
    return lines


def describe_machine() -> dict[str, Any]:
    """Device, driver and versions. Only on a machine without obstacles."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    packages = ("torch", "triton", "transformers", "numpy", "ray", "flash-attn", "flash-attn-3", "vllm")
    return {
        "device": properties.name,
        "num_devices": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: version for name in packages if (version := _version(name)) is not None},
    }


def commit_of(root: Path) -> dict[str, Any]:
    """The commit that was run and whether files differed from it; None if this is no git checkout."""
    commit = first_line(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = first_line(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "changed": None if commit is None else changed is not None}


def first_line(command: list[str]) -> str | None:
    """First line that a command prints; None if it is not there, fails, or prints nothing."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
