"""Shared memory of this machine, told apart by who uses it: other tests and runs may be beside this one."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")


def entries() -> set[str]:
    """Names of files and folders in shared memory."""
    return set(os.listdir(FOLDER))


def used() -> set[str]:
    """Those of them that a process has open or mapped, or in which it has something open, as the lock of a folder."""
    paths: set[str] = set()
    for process in psutil.process_iter():
        try:
            paths |= {part.path for part in process.memory_maps()} | {file.path for file in process.open_files()}
        except (psutil.Error, OSError):
            continue
    return {path.split("/")[3] for path in paths if path.startswith(f"{FOLDER}/")}


def left(before: set[str]) -> set[str]:
    """What was not there before, and is nobody's. Looked at twice: whoever makes something opens it soon, and takes it
    away after it has closed it."""
    new = entries() - before
    new = new - used() if new else new
    return new & entries() - used() if new else new
