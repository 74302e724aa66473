"""What a host, or a container, may have too little of for a run."""

from __future__ import annotations

import getpass
import os
import resource
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 2**30  # containers of Docker have 64 MiB, those of Kubernetes too
LEAST_FILES = 1024  # a rank with its engine and rewards has some hundred open


def limits() -> str:
    """Return this process's limits of open files and locked memory, in words."""
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    sizes = ["unlimited" if size == resource.RLIM_INFINITY else f"{size:,}" for size in (files, locked)]
    return f"{sizes[0]} open files (ulimit -n), {sizes[1]} bytes locked (ulimit -l; InfiniBand needs unlimited)"


def host_doubts(num_ranks: int) -> tuple[str, ...]:
    """Return what this host has too little of, a sentence each. num_ranks: of the run."""
    doubts = []
    if num_ranks > 1 and SHARED_MEMORY.is_dir():
        size = shutil.disk_usage(SHARED_MEMORY).total
        if size < LEAST_SHARED_BYTES:
            doubts.append(
                f"{SHARED_MEMORY} holds {size / 2**20:.0f} MiB, where Ray keeps batches and ranks exchange weights and "
                f"messages; start the container with --shm-size=16g or --ipc=host (Kubernetes: mount an emptyDir with "
                f"medium: Memory there)"
            )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < LEAST_FILES:
        doubts.append(f"a process may have {files} files open, and a rank needs some hundred; raise `ulimit -n`")
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute() or not os.access(home, os.W_OK | os.X_OK):
        doubts.append(
            f"the home folder {str(home)!r} is not there or cannot be written: Hugging Face, vLLM and Triton have "
            f"their caches there; set HOME to a folder that can be written"
        )
    try:
        getpass.getuser()
    except (KeyError, OSError):
        doubts.append(
            f"user {os.getuid()} has no name, which PyTorch's compiler takes for the folder of its cache; set USER, or "
            f"TORCHINDUCTOR_CACHE_DIR"
        )
    return tuple(doubts)
