"""Checkpoints: a folder that `from_pretrained` reads, with the rest of the training state beside the weights.

A checkpoint appears whole or not at all: it is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from hybrid_rl.errors import CheckpointError

logger = logging.getLogger("hybrid_rl")

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"


def write_checkpoint(
    folder: Path, save_model: Callable[[Path], None], optimizer: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Write a checkpoint to `folder`. An existing checkpoint there is replaced only once the new one is complete.

    Raises CheckpointError (disk full, no permission ...); nothing half-written stays behind.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    replaced = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear_up(folder.parent)
        if folder.exists() and any(folder.iterdir()) and not (folder / STATE_FILE).exists():
            raise CheckpointError(f"{folder} exists and is not a checkpoint; choose another folder")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_model(temporary)
        torch.save(dict(optimizer), temporary / OPTIMIZER_FILE)
        (temporary / STATE_FILE).write_text(json.dumps(state, indent=2))
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
    except CheckpointError:
        raise
    except Exception as error:  # safetensors and torch.save wrap I/O errors in types of their own
        raise CheckpointError(
            f"cannot write checkpoint {folder}: {error}; earlier checkpoints are untouched. Free space or choose "
            f"another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)


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


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's state of a checkpoint, on the CPU."""
    path = folder / OPTIMIZER_FILE
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises pickle, zip, runtime and I/O errors
        raise CheckpointError(f"cannot read {path}: {error}") from error


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
