"""Which checkpoint a run goes on from, and what processes left that were killed while they wrote one."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import psutil

from hybrid_rl.checkpoint.manifest import STATE_FILE
from hybrid_rl.checkpoint.reading import read_state
from hybrid_rl.errors import StorageError
from hybrid_rl.files import set_aside
from hybrid_rl.owners import Owner

logger = logging.getLogger("hybrid_rl")

_LEFT = re.compile(r"\.(.+?)\.(\d+|\d+-\d+-\d+-[0-9A-Za-z_.]+-.*)\.(old|tmp)")


def hidden_name(folder: Path, kind: str) -> Path:
    """Where this process writes a checkpoint until it is complete ("tmp"), or keeps one that is replaced ("old")."""
    return folder.with_name(f".{folder.name}.{Owner.here().token}.{kind}")


def clear_up(run: Path, *, is_ours: bool = False) -> None:
    """What processes left that are gone: a checkpoint that was being replaced comes back, an unfinished one goes.
    is_ours: nobody else can be writing checkpoints of this run, so that those of unknown owners are left over too."""
    for path in run.glob(".*"):
        match = _LEFT.fullmatch(path.name)
        if match is None or not _is_left(match[2], is_ours=is_ours and match[1].startswith("checkpoint-")):
            continue
        target = run / match[1]
        if match[3] == "old" and (path / STATE_FILE).is_file() and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_left(owner: str, *, is_ours: bool) -> bool:
    known = Owner.of_token(owner)
    if known is None:  # of an earlier version, which wrote the pid alone
        return is_ours or not owner.isdigit() or not psutil.pid_exists(int(owner))
    standing = known.standing()
    return standing == "gone" or (standing == "unknown" and is_ours)


def newest_checkpoint(run: Path, *, is_ours: bool = False) -> Path | None:
    """The checkpoint of a run folder with the most training steps, None for none. is_ours: see `clear_up`."""
    clear_up(run, is_ours=is_ours)
    complete = [(step, path) for step, path in checkpoints_of(run).items() if (path / STATE_FILE).is_file()]
    return max(complete)[1] if complete else None


def checkpoints_of(run: Path) -> dict[int, Path]:
    """The folders of a run that are named like checkpoints, whatever they hold, by their training steps."""
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in run.glob("checkpoint-*") if path.is_dir())
    return {int(match[1]): path for match, path in found if match is not None}


def set_later_aside(run: Path, step: int, checkpoint: Path | None) -> list[Path]:
    """Rename the checkpoints of a run folder that a training from `checkpoint`, of this step, leaves to another branch:
    a later `resume=auto` must not take them for the newest ones. None of them is deleted. checkpoint: None for a
    training from the beginning. Returns the new paths, by steps.

    Killed anywhere in between, the same call again does the rest. Raises StorageError.
    """
    clear_up(run, is_ours=True)  # else one that was being replaced would come back later
    moved = []
    try:
        for number, path in sorted(checkpoints_of(run).items()):
            is_where_it_began = checkpoint is not None and checkpoint.exists() and path.samefile(checkpoint)
            if number >= step and not is_where_it_began:
                moved.append(set_aside(path, "abandoned"))
    except OSError as error:
        raise StorageError(
            f"cannot rename the checkpoints of {run} that are later than step {step}: {error}; make the folder "
            "writable, or give another run_name"
        ) from error
    return moved


def resumed_folder(resume: str | None, output_dir: str, run_name: str | None) -> Path | None:
    """The run folder that goes on: that of run_name where `resume` is "auto", whether it is there or not; the one that
    a checkpoint lies in, unless another run_name is given. None where a new run begins."""
    if resume is None:
        return None
    named = None if run_name is None else Path(output_dir).absolute() / run_name
    if resume == "auto":
        return named
    beside = Path(resume).resolve().parent
    is_run = any((beside / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    if run_name is None:
        return beside if is_run else None
    is_named = named is not None and named.resolve() == beside
    return beside if is_named or (is_run and run_name == beside.name) else None


def find_checkpoint(resume: str | None, output_dir: str, run_name: str | None, *, is_ours: bool = False) -> Path | None:
    """The checkpoint that `resume` means: a folder, or "auto" for the newest of the run (None while there is none).
    is_ours: see `clear_up`. Raises CheckpointError for one that cannot be resumed."""
    if resume is None:
        return None
    if resume != "auto":
        read_state(Path(resume))
        return Path(resume)
    found = newest_checkpoint(Path(output_dir) / str(run_name), is_ours=is_ours)
    if found is None:
        logger.warning("resume=auto: %s/%s has no checkpoint yet; starting from the beginning", output_dir, run_name)
    else:
        read_state(found)
    return found
