"""Folders of tensors that are complete or absent: written by all ranks, with a manifest of what each file holds.

Checkpoints and the versions of the disk handoff are such folders. A folder is written under another name and renamed
when everything in it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hybrid_rl.errors import CheckpointError, PeerFailedError
from hybrid_rl.process.files import content_digest
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.resharding.shards import write_shards

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Content:
    """What a file holds: its size in bytes, and a hash of them."""

    size: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Content:
        """Read a file. Raises OSError."""
        mark_progress()
        return cls(path.stat().st_size, content_digest(path))

    def problem_of(self, path: Path, *, is_read: bool = True) -> str | None:
        """Describe how a file differs from what was written; None if it does not. is_read: False compares sizes
        only."""
        try:
            size = path.stat().st_size
            if size != self.size:
                return f"it has {size} bytes, but {self.size} were written"
            return "its content is not what was written" if is_read and Content.of(path) != self else None
        except FileNotFoundError:
            return "it is missing"
        except OSError as error:
            return f"it cannot be read ({error})"


class ElsewhereError(Exception):
    """The failure of another rank."""


def agreed(
    gather: Callable[[Any], list[Any]],
    action: Callable[[], Any],
    is_of_peer: Callable[[BaseException], bool] = lambda error: False,
) -> list[Any]:
    """Run an action on every rank and return its results by rank. If one rank raises, all raise once all are done.

    gather: the values of all ranks, by rank. Raises this rank's own error; for another rank's ElsewhereError, or
    PeerFailedError if `is_of_peer` says there that yet another rank is the cause.
    """
    result, failure = None, None
    try:
        result = action()
    except BaseException as error:
        failure = error
    report = None if failure is None else (f"{type(failure).__name__}: {failure}", is_of_peer(failure))
    outcomes = gather((result, report))
    if failure is not None:
        raise failure
    for other, (_, theirs) in enumerate(outcomes):
        if theirs is not None:
            message, is_echo = theirs
            raise (PeerFailedError if is_echo else ElsewhereError)(f"rank {other}: {message}")
    return [value for value, _ in outcomes]


def write_part(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Content]:
    """Write this rank's parts of tensors into a folder that rank 0 made, and wait until they are on the disk.

    Return the content of its file by name, nothing if it has no part. Raises CheckpointError if this rank does not see
    the folder, OSError, and errors of safetensors.
    """
    require_shared(folder, rank)
    path = write_shards(folder, tensors, rank)
    if path is None:
        return {}
    sync(path)
    return {path.name: Content.of(path)}


def require_shared(folder: Path, rank: int) -> None:
    """Raise CheckpointError if this rank does not see a folder that rank 0 made."""
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} on {socket.gethostname()} does not see {folder}, which rank 0 made; save to a file system "
            f"that all nodes share"
        )


@contextmanager
def replacing(folder: Path, partial: Path, replaced: Path, *, is_leader: bool) -> Iterator[None]:
    """Write a folder as `partial` inside the block, which ends with `put_in_place`. Whatever goes wrong, nothing half
    written remains, and a folder that had the name keeps it."""
    try:
        yield
    finally:
        if is_leader:
            shutil.rmtree(partial, ignore_errors=True)
            if replaced.exists() and not folder.exists():
                replaced.rename(folder)
            shutil.rmtree(replaced, ignore_errors=True)


def put_in_place(folder: Path, partial: Path, replaced: Path) -> None:
    """Give a complete folder its name. A folder that has it is called `replaced` from then on. Raises OSError."""
    # After a loss of power the renamed folder must hold what was written: files first, then the names.
    for path in (*partial.rglob("*"), partial):
        sync(path)
    if folder.is_dir():
        folder.rename(replaced)
    partial.rename(folder)
    sync(folder.parent)


def write_manifest(folder: Path, known: Mapping[str, Content], **more: Any) -> None:
    """Write the manifest of all files in a folder. known: those that others have read, by name in the folder. more:
    further entries, of types that JSON has."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if gone := known.keys() - paths.keys():
        raise FileNotFoundError(f"{folder / min(gone)} was deleted while the folder was written")
    files = {name: asdict(known.get(name) or Content.of(path)) for name, path in paths.items()}
    manifest = {**more, "files": files, "digest": _digest(files)}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2))


def read_manifest(folder: Path) -> tuple[dict[str, Content], dict[str, Any]] | None:
    """Return the contents of a folder's files by name, and its whole manifest; None if there is no manifest.

    Raises ValueError if it is damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        manifest: Any = json.loads(path.read_text())
        if manifest["digest"] != _digest(manifest["files"]):
            raise ValueError("its content does not match its hash")
        return {name: Content(**content) for name, content in manifest["files"].items()}, manifest
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=16).hexdigest()
