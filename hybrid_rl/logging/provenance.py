"""Where a run was made: versions, machine, command, and the state of the user's code."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("hybrid_rl", "torch", "transformers", "numpy", "datasets", "accelerate", "ray", "vllm", "flash-attn")
# Environment variables are recorded only if they are named here: others may hold secrets.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "SLURM_JOB_ID")
SECRET = re.compile(r"key|token(?!s\b|s_|ize|_id|_cap)|secret|passw|credential|auth", re.IGNORECASE)
GIT_SECONDS = 2.0
MAX_ARGUMENT = 300  # characters


@functools.cache
def environment() -> dict[str, Any]:
    """Describe this process and its machine, once: what a person needs who compares two runs.

    Environment variables other than VARIABLES are not read, and values of arguments whose name looks like that of a
    secret are replaced by ***.
    """
    memory = psutil.virtual_memory().total
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command(sys.orig_argv),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": memory,
            "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "code": code_state(_folder_of_the_user()),
    }


def command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without secrets, each of bounded length."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if hides_next and not argument.startswith("-"):
            argument = "***"
        elif equals and value and SECRET.search(name):
            argument = f"{name}=***"
        hides_next = argument.startswith("-") and not equals and bool(SECRET.search(name))
        shown.append(argument if len(argument) <= MAX_ARGUMENT else f"{argument[:MAX_ARGUMENT]}...")
    return shown


def code_state(folder: Path) -> dict[str, Any]:
    """Return commit, branch and whether files have changed since, of the git repository that a folder is in; {} if
    there is none, or if git does not answer soon."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
        changed = _git(folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "branch": branch, "has_changes": bool(changed)}


def _git(folder: Path, *arguments: str) -> str:
    answer = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
    )
    return answer.stdout.strip()


def _folder_of_the_user() -> Path:
    """Return the folder of the script that runs, or the current one, as in a notebook."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
