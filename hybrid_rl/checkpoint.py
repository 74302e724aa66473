"""Checkpoints: a folder that `from_pretrained` reads, with the rest of the training state beside the weights.

A checkpoint appears whole or not at all: it is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
from torch import Tensor

from hybrid_rl.errors import CheckpointError
from hybrid_rl.resharding.shards import read_shards, stored_shapes, write_shards

logger = logging.getLogger("hybrid_rl")

STATE_FILE = "trainer_state.json"
OPTIMIZER_FOLDER = "optimizer"
SCALARS_FILE = "scalars.json"


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

    Raises CheckpointError on every rank (disk full, no permission ...); nothing half-written stays behind.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    replaced = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    is_leader = rank == 0
    try:
        common = Path(_agreed(gather, lambda: _begin(folder, temporary, parts) if is_leader else None)[0])
        _agreed(gather, lambda: save_model(common))
        for part, its in {"": optimizer, **parts}.items():
            _agreed(gather, functools.partial(_write_optimizer, common / part / OPTIMIZER_FOLDER, its, rank))
        _agreed(gather, lambda: _complete(folder, temporary, replaced, state) if is_leader else None)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors wraps I/O errors in types of its own
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


def _agreed(gather: Callable[[Any], list[Any]], action: Callable[[], Any]) -> list[Any]:
    """Results of an action by rank. Where it raises on a rank, it raises on all of them once all are done."""
    result, failure = None, None
    try:
        result = action()
    except BaseException as error:
        failure = error
    outcomes = gather((result, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for other, (_, theirs) in enumerate(outcomes):
        if theirs is not None:
            raise RuntimeError(f"rank {other}: {theirs}")
    return [value for value, _ in outcomes]


def _begin(folder: Path, temporary: Path, parts: Iterable[str]) -> str:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_up(folder.parent)
    if folder.exists() and any(folder.iterdir()) and not (folder / STATE_FILE).exists():
        raise CheckpointError(f"{folder} exists and is not a checkpoint; choose another folder")
    shutil.rmtree(temporary, ignore_errors=True)
    for part in ("", *parts):
        (temporary / part / OPTIMIZER_FOLDER).mkdir(parents=True)
    return str(temporary)


def _write_optimizer(folder: Path, optimizer: Mapping[str, Any], rank: int) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} on {socket.gethostname()} does not see {folder}, which rank 0 made; save to a file system "
            f"that all nodes share"
        )
    tensors, rest = _split(optimizer)
    written = write_shards(folder, tensors, rank)
    if rank == 0:
        (folder / SCALARS_FILE).write_text(json.dumps(rest, indent=2))
    if written is not None:
        _sync(written)


def _complete(folder: Path, temporary: Path, replaced: Path, state: Mapping[str, Any]) -> None:
    (temporary / STATE_FILE).write_text(json.dumps(state, indent=2))
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


def _split(state: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of nested mappings by path ("exp_avg.<parameter>"), and the same mappings without them."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            inner, rest[key] = _split(value, f"{prefix}{key}.")
            tensors |= inner
        else:
            rest[key] = value
    return tensors, rest


def _joined(state: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of `state` and everything else of `rest`."""
    found = dict(rest)
    for key, value in state.items():
        if isinstance(value, Tensor):
            found[key] = value
        elif isinstance(value, Mapping):
            found[key] = _joined(value, rest.get(key, {}))
    return found


def _clear_up(run: Path) -> None:
    """What processes left that were killed while they wrote: a checkpoint that was being replaced comes back, an
    unfinished one goes."""
    for path in run.glob(".*"):
        match = re.fullmatch(r"\.(.+)\.(\d+)\.(old|tmp)", path.name)
        if match is None or psutil.pid_exists(int(match[2])):
            continue
        target = run / match[1]
        if match[3] == "old" and (path / STATE_FILE).is_file() and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def read_state(folder: Path, required: Iterable[str] = ()) -> dict[str, Any]:
    """The trainer's state of a checkpoint. Raises CheckpointError where it, or a required entry, is missing."""
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {STATE_FILE}")
    try:
        state = json.loads(path.read_text())
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}, not an object")
        missing = sorted(set(required) - state.keys())
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return state


def read_optimizer_into(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the tensors of an optimizer's state from a checkpoint that any number of ranks wrote, and return the state:
    those tensors, and the checkpoint's numbers.

    Every rank reads its own parts; nothing is communicated. Raises CheckpointError, before anything is changed, where
    the files are damaged or of another model.
    """
    path = folder / OPTIMIZER_FOLDER
    rest = _read_scalars(path)
    read_shards(path, _split(state)[0])
    return _joined(state, rest)


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's state of a checkpoint in full, on the CPU."""
    path = folder / OPTIMIZER_FOLDER
    state = _read_scalars(path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_shapes(path).items()}
    read_shards(path, tensors)
    for name, tensor in tensors.items():
        kind, _, parameter = name.partition(".")
        if parameter:
            state.setdefault(kind, {})[parameter] = tensor
        else:
            state[kind] = tensor
    return state


def _read_scalars(folder: Path) -> dict[str, Any]:
    path = folder / SCALARS_FILE
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return found


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of a run folder with the most training steps, None where there is none."""
    _clear_up(run)
    found = [
        (int(match[1]), path)
        for path in run.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    ]
    complete = [(step, path) for step, path in found if (path / STATE_FILE).is_file()]
    return max(complete)[1] if complete else None


def find_checkpoint(resume: str | None, output_dir: str, run_name: str | None) -> Path | None:
    """The checkpoint that `resume` means: a folder, or "auto" for the newest of the run (None while there is none)."""
    if resume is None:
        return None
    if resume == "auto":
        found = newest_checkpoint(Path(output_dir) / str(run_name))
        if found is None:
            logger.warning(
                "resume=auto: %s/%s has no checkpoint yet; starting from the beginning", output_dir, run_name
            )
        return found
    read_state(Path(resume))
    return Path(resume)
