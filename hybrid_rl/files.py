"""Files as everybody writes them: tensors with the mode of all other files, and what tells a content from another."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

BLOCK_BYTES = 16 * 2**20
MAX_THREADS = 8


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. safetensors would make it for this user's eyes only, whatever the umask says."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)


def set_aside(path: Path, kind: str) -> Path:
    """Rename a file or folder to `<name>.<kind>`, or with a number after it (`<name>.<kind>-2`) where that is taken, in
    one step: whoever is killed has done it or not. Nothing is replaced. Returns its new path; raises OSError."""
    target, number = path.with_name(f"{path.name}.{kind}"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.{kind}-{number}")
    return path.rename(target)


def content_digest(path: Path) -> str:
    """A hash of what a file holds: of the hashes of its blocks, of which several are computed at a time."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        starts = range(0, os.fstat(file.fileno()).st_size, BLOCK_BYTES)

        def block_digest(start: int) -> bytes:
            return hashlib.blake2b(_read(file.fileno(), start), digest_size=16).digest()

        if len(starts) < 2:
            blocks = [block_digest(start) for start in starts]
        else:
            with ThreadPoolExecutor(min(len(starts), MAX_THREADS, os.cpu_count() or 1)) as pool:
                blocks = list(pool.map(block_digest, starts))
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _read(descriptor: int, start: int) -> bytes:
    """A block of a file, or what there is of it. One call may give less on some file systems."""
    found = b""
    while len(found) < BLOCK_BYTES and (part := os.pread(descriptor, BLOCK_BYTES - len(found), start + len(found))):
        found = found + part if found else part
    return found
