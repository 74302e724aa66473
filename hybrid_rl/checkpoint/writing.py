"""Writing a checkpoint: by all ranks, whole or not at all."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybrid_rl.checkpoint.finding import clear_up, hidden_name
from hybrid_rl.checkpoint.manifest import STATE_FILE, Content, write_manifest
from hybrid_rl.checkpoint.reading import OPTIMIZER_FOLDER, SCALARS_FILE, check_name, split
from hybrid_rl.controller.failures import is_disconnect
from hybrid_rl.errors import CheckpointError, PeerFailedError
from hybrid_rl.resharding.shards import write_shards


def write_checkpoint(
    folder: Path,
    save_model: Callable[[Path], None],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    parts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    rank: int = 0,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> None:
    """Write a checkpoint to `folder`. An existing checkpoint there is replaced only once the new one is complete and
    on the disk.

    Every rank calls it. save_model: writes the model into the folder that it is given. optimizer: a mapping of tensors,
    mappings of tensors by parameter name, and what JSON can hold; sharded tensors are written by all ranks. state: the
    trainer's, written by rank 0. parts: optimizers of further models, each under the name of the folder that save_model
    makes for it. gather: the values of all ranks, by rank; ranks agree through it, so that all succeed or none.

    Raises CheckpointError on every rank (disk full, no permission ...), and PeerFailedError where another rank is gone;
    nothing half-written stays behind.
    """
    temporary, replaced = hidden_name(folder, "tmp"), hidden_name(folder, "old")
    is_leader = rank == 0
    try:
        common = Path(_agreed(gather, lambda: _begin(folder, temporary, parts, state) if is_leader else None)[0])
        _agreed(gather, lambda: save_model(common))
        known: dict[str, Content] = {}
        for part, its in {"": optimizer, **parts}.items():
            write = functools.partial(_write_optimizer, common, Path(part) / OPTIMIZER_FOLDER, its, rank)
            for contents in _agreed(gather, write):
                known |= contents
        _agreed(gather, lambda: _complete(folder, temporary, replaced, state, known) if is_leader else None)
    except (CheckpointError, PeerFailedError):
        raise
    except Exception as error:  # safetensors wraps I/O errors in types of its own
        if is_disconnect(error):
            # Whose end it was the controller knows; what to do about a full disk would lead astray.
            raise PeerFailedError(f"another rank is gone, so checkpoint {folder} was not written") from error
        raise CheckpointError(
            f"cannot write checkpoint {folder}: {error}; earlier checkpoints are untouched. Free space or choose "
            f"another folder"
        ) from error
    finally:
        if is_leader:
            shutil.rmtree(temporary, ignore_errors=True)
            if replaced.exists() and not folder.exists():
                replaced.rename(folder)
            shutil.rmtree(replaced, ignore_errors=True)


class _ElsewhereError(Exception):
    """What another rank failed with."""


def _agreed(gather: Callable[[Any], list[Any]], action: Callable[[], Any]) -> list[Any]:
    """Results of an action by rank. Where it raises on a rank, it raises on all of them once all are done."""
    result, failure = None, None
    try:
        result = action()
    except BaseException as error:
        failure = error
    told = None if failure is None else (f"{type(failure).__name__}: {failure}", is_disconnect(failure))
    outcomes = gather((result, told))
    if failure is not None:
        raise failure
    for other, (_, theirs) in enumerate(outcomes):
        if theirs is not None:
            message, is_of_peer = theirs
            raise (PeerFailedError if is_of_peer else _ElsewhereError)(f"rank {other}: {message}")
    return [value for value, _ in outcomes]


def _begin(folder: Path, temporary: Path, parts: Iterable[str], state: Mapping[str, Any]) -> str:
    check_name(folder, state)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_up(folder.parent)
    if folder.exists() and any(folder.iterdir()) and not (folder / STATE_FILE).exists():
        raise CheckpointError(f"{folder} exists and is not a checkpoint; choose another folder")
    shutil.rmtree(temporary, ignore_errors=True)
    for part in ("", *parts):
        (temporary / part / OPTIMIZER_FOLDER).mkdir(parents=True)
    return str(temporary)


def _write_optimizer(common: Path, name: Path, optimizer: Mapping[str, Any], rank: int) -> dict[str, Content]:
    """Write this rank's part into a folder of the checkpoint; what its file holds, by its name in the checkpoint."""
    folder = common / name
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} on {socket.gethostname()} does not see {folder}, which rank 0 made; save to a file system "
            f"that all nodes share"
        )
    tensors, rest = split(optimizer)
    written = write_shards(folder, tensors, rank)
    if rank == 0:
        (folder / SCALARS_FILE).write_text(json.dumps(rest, indent=2))
    if written is None:
        return {}
    _sync(written)
    return {(name / written.name).as_posix(): Content.of(written)}


def _complete(
    folder: Path, temporary: Path, replaced: Path, state: Mapping[str, Any], known: Mapping[str, Content]
) -> None:
    (temporary / STATE_FILE).write_text(json.dumps(state, indent=2))
    write_manifest(temporary, known)
    # After a loss of power the renamed folder must hold what was written: files first, then the names.
    for path in (*temporary.rglob("*"), temporary):
        _sync(path)
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
