"""Files: tensors with normal permissions, small texts, tables in YAML, renaming without replacement, and a hash of the
contents."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from torch import Tensor

# What takes the tensors of a file, with its path and metadata, in place of the disk. They are its own, on the CPU.
Sink = Callable[["dict[str, Tensor]", Path, Mapping[str, str]], None]

BLOCK_BYTES = 16 * 2**20
MAX_THREADS = 8


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with normal permissions: safetensors ignores the umask and hides it from others."""
    from safetensors.torch import save_file  # imports torch, which those that write texts do without

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)


def set_aside(path: Path, kind: str) -> Path:
    """Rename a file or folder to `<name>.<kind>`, or `<name>.<kind>-2` and so on if that exists, and return its new
    path. The rename is atomic and replaces nothing. Raises OSError."""
    target, number = path.with_name(f"{path.name}.{kind}"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.{kind}-{number}")
    return path.rename(target)


def write_text(path: Path, text: str) -> None:
    """Write a small file, completely or not at all. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def content_digest(path: Path) -> str:
    """Return a hash of a file's content: the hash of the hashes of its blocks, several of them computed at once."""
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
    """Read a block of a file, shorter at its end. One call may return less on some file systems."""
    block = b""
    while len(block) < BLOCK_BYTES and (part := os.pread(descriptor, BLOCK_BYTES - len(block), start + len(block))):
        block = block + part if block else part
    return block


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file of the package."""
    with path.open(encoding="utf-8") as stream:
        content: dict[str, Any] = yaml.load(stream, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return content
