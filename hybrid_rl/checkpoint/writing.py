"""Writing of a checkpoint by all ranks, whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybrid_rl.checkpoint.background import BackgroundWrite
from hybrid_rl.checkpoint.finding import clear_up, hidden_name, sync_records
from hybrid_rl.checkpoint.manifest import MANIFEST_FILE, STATE_FILE
from hybrid_rl.checkpoint.reading import OPTIMIZER_FOLDER, SCALARS_FILE, check_name, split
from hybrid_rl.checkpoint.snapshot import Room, SaveModel, Snapshot, missing_room
from hybrid_rl.controller.failures import is_disconnect
from hybrid_rl.errors import CheckpointError, PeerFailedError
from hybrid_rl.resharding.folders import (
    Content,
    agreed,
    put_in_place,
    replacing,
    require_shared,
    write_manifest,
    write_part,
)

Gather = Callable[[Any], list[Any]]
# What safetensors and other ranks say of an error of the file system, which they pass on as text.
_OF_DISK = re.compile(r"OSError|FileNotFoundError|PermissionError|Errno|os error|I/O error|not mounted")


def write_checkpoint(
    folder: Path,
    save_model: Callable[[Path], None],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any] | None,
    *,
    parts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    rank: int = 0,
    gather: Gather = lambda value: [value],
) -> None:
    """Write a checkpoint to `folder`. An existing checkpoint there is replaced only once the new one is complete and
    on the disk.

    Every rank calls it. save_model: writes the model into the folder that it is given. optimizer: a mapping of tensors,
    mappings of tensors by parameter name, and what JSON can hold; sharded tensors are written by all ranks. state: the
    trainer's, written by rank 0; None for a model by itself. parts: optimizers of further models, each under the name
    of the folder that save_model makes for it. gather: the values of all ranks, by rank; ranks agree through it, so
    that all succeed or none.

    Raises CheckpointError on every rank (disk full, no permission ...), and PeerFailedError if another rank is gone;
    nothing half-written is left.
    """
    optimizers = {} if state is None else {"": optimizer, **parts}
    kind = "model" if state is None else "checkpoint"
    temporary, replaced = hidden_name(folder, "tmp"), hidden_name(folder, "old")
    is_leader = rank == 0

    def complete(known: Mapping[str, Content]) -> None:
        if state is not None:
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=2))
        write_manifest(temporary, known)
        sync_records(folder.parent)
        put_in_place(folder, temporary, replaced)

    agree = functools.partial(agreed, gather, is_of_peer=is_disconnect)
    with _explained(kind, folder), replacing(folder, temporary, replaced, is_leader=is_leader):
        common = Path(agree(lambda: _begin(folder, temporary, optimizers, state) if is_leader else None)[0])
        agree(lambda: save_model(common))
        known: dict[str, Content] = {}
        for part, its in optimizers.items():
            write = functools.partial(_write_optimizer, common, Path(part) / OPTIMIZER_FOLDER, its, rank)
            for contents in agree(write):
                known |= contents
        agree(lambda: complete(known) if is_leader else None)


def write_model(folder: Path, save_model: Callable[[Path], None], *, rank: int, gather: Gather) -> None:
    """Write a model by itself in the same way, without what a resumed run needs. It replaces only such a model."""
    write_checkpoint(folder, save_model, {}, None, rank=rank, gather=gather)


def begin_checkpoint(
    folder: Path,
    save_model: SaveModel,
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    parts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    model_bytes: int = 0,
    rank: int = 0,
    gather: Gather = lambda value: [value],
) -> BackgroundWrite | Room:
    """Take a snapshot of what `write_checkpoint` would write, and begin to write it while training goes on.

    Every rank calls it. model_bytes: of the models' files that this rank writes. Returns the writing; instead, if the
    memory of a host cannot hold the snapshots of its ranks, what it would take there, and nothing has happened then.

    Raises as `write_checkpoint` for what goes wrong so far.
    """
    optimizers, temporary = {"": optimizer, **parts}, hidden_name(folder, "tmp")
    agree = functools.partial(agreed, gather, is_of_peer=is_disconnect)
    with _explained("checkpoint", folder):
        missing = missing_room(agree(lambda: Room.of(model_bytes, optimizers, rank)))
        if missing is not None:
            return missing
        try:
            common = Path(agree(lambda: _begin(folder, temporary, (), state) if rank == 0 else None)[0])
            require_shared(common, rank)
            snapshot = Snapshot()

            def take() -> str:
                nonlocal snapshot
                snapshot = Snapshot.take(save_model, optimizers, rank)
                return json.dumps(state, indent=2) if rank == 0 else ""

            text = agree(take)[0]
        except BaseException:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    return BackgroundWrite(folder, common, snapshot, text, rank=rank, num_ranks=len(gather(None)))


@contextlib.contextmanager
def _explained(what: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, PeerFailedError):
        raise
    except Exception as error:  # safetensors wraps I/O errors in its own types
        if is_disconnect(error):
            # The controller knows which rank ended; what to do about a full disk would be misleading.
            raise PeerFailedError(f"another rank is gone, so {what} {folder} was not written") from error
        raise CheckpointError(failure(folder, error, what)) from error


def failure(folder: Path, error: object, what: str = "checkpoint") -> str:
    """Say that a checkpoint could not be written, and what helps. error: the exception, or what a rank says of it."""
    failed = f"cannot write {what} {folder}: {error}"
    if isinstance(error, OSError) or _OF_DISK.search(str(error)):
        return f"{failed}; earlier checkpoints are untouched. Free space or choose another folder"
    return f"{failed}; earlier checkpoints are untouched. Correct what it names, and call trainer.save()"


def _begin(folder: Path, temporary: Path, parts: Iterable[str], state: Mapping[str, Any] | None) -> str:
    if state is not None:
        check_name(folder, state)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_up(folder.parent)
    is_checkpoint = (folder / STATE_FILE).exists()
    is_such = is_checkpoint if state is not None else (folder / MANIFEST_FILE).exists() and not is_checkpoint
    if folder.exists() and any(folder.iterdir()) and not is_such:
        kind = "a checkpoint" if state is not None else "a model that was saved by itself"
        raise CheckpointError(f"{folder} exists and is not {kind}; choose another folder")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for part in parts:
        (temporary / part / OPTIMIZER_FOLDER).mkdir(parents=True)
    return str(temporary)


def _write_optimizer(common: Path, name: Path, optimizer: Mapping[str, Any], rank: int) -> dict[str, Content]:
    """Write this rank's part into a folder of the checkpoint; what its file holds, by its name in the checkpoint."""
    tensors, rest = split(optimizer)
    written = write_part(common / name, tensors, rank)
    if rank == 0:
        (common / name / SCALARS_FILE).write_text(json.dumps(rest, indent=2))
    return {(name / file).as_posix(): content for file, content in written.items()}
