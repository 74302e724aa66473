"""Writing of a checkpoint by all ranks, whole or not at all."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybrid_rl.checkpoint.finding import clear_up, hidden_name
from hybrid_rl.checkpoint.manifest import STATE_FILE
from hybrid_rl.checkpoint.reading import OPTIMIZER_FOLDER, SCALARS_FILE, check_name, split
from hybrid_rl.controller.failures import is_disconnect
from hybrid_rl.errors import CheckpointError, PeerFailedError
from hybrid_rl.resharding.folders import Content, agreed, put_in_place, replacing, write_manifest, write_part


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

    Raises CheckpointError on every rank (disk full, no permission ...), and PeerFailedError if another rank is gone;
    nothing half-written is left.
    """
    temporary, replaced = hidden_name(folder, "tmp"), hidden_name(folder, "old")
    is_leader = rank == 0

    def complete(known: Mapping[str, Content]) -> None:
        (temporary / STATE_FILE).write_text(json.dumps(state, indent=2))
        write_manifest(temporary, known)
        put_in_place(folder, temporary, replaced)

    agree = functools.partial(agreed, gather, is_of_peer=is_disconnect)
    try:
        with replacing(folder, temporary, replaced, is_leader=is_leader):
            common = Path(agree(lambda: _begin(folder, temporary, parts, state) if is_leader else None)[0])
            agree(lambda: save_model(common))
            known: dict[str, Content] = {}
            for part, its in {"": optimizer, **parts}.items():
                write = functools.partial(_write_optimizer, common, Path(part) / OPTIMIZER_FOLDER, its, rank)
                for contents in agree(write):
                    known |= contents
            agree(lambda: complete(known) if is_leader else None)
    except (CheckpointError, PeerFailedError):
        raise
    except Exception as error:  # safetensors wraps I/O errors in its own types
        if is_disconnect(error):
            # The controller knows which rank ended; what to do about a full disk would be misleading.
            raise PeerFailedError(f"another rank is gone, so checkpoint {folder} was not written") from error
        raise CheckpointError(
            f"cannot write checkpoint {folder}: {error}; earlier checkpoints are untouched. Free space or choose "
            f"another folder"
        ) from error


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
    tensors, rest = split(optimizer)
    written = write_part(common / name, tensors, rank)
    if rank == 0:
        (common / name / SCALARS_FILE).write_text(json.dumps(rest, indent=2))
    return {(name / file).as_posix(): content for file, content in written.items()}
