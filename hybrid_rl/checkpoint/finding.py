"""Search for the checkpoint to resume from, and clean-up after processes that were killed while they wrote one."""

from __future__ import annotations

import contextlib
import glob
import logging
import re
import shutil
from pathlib import Path

import psutil

from hybrid_rl.checkpoint.manifest import MANIFEST_FILE, STATE_FILE, check_checkpoint
from hybrid_rl.checkpoint.owners import Owner
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.errors import CheckpointError, StorageError
from hybrid_rl.process.files import set_aside
from hybrid_rl.resharding.folders import sync

logger = logging.getLogger("hybrid_rl")

ABANDONED = r"checkpoint-\d+\.abandoned(-\d+)?"

_LEFT = re.compile(r"\.(.+?)\.(\d+|\d+-\d+-\d+-[0-9A-Za-z_.]+-.*)\.(old|tmp)")


def hidden_name(folder: Path, kind: str) -> Path:
    """Return the path of a checkpoint that this process is writing ("tmp"), or of one that it is replacing ("old")."""
    return folder.with_name(f".{folder.name}.{Owner.here().token}.{kind}")


def sync_records(run: Path) -> None:
    """Wait until the records of a run folder are on the disk: after a loss of power a checkpoint must not be there
    without those of its steps. Any other folder is left alone, and a disk that fails has been told of."""
    if (run / "metrics.jsonl").is_file():
        for path in run.glob("*.jsonl"):
            with contextlib.suppress(OSError):
                sync(path)


def clear_up(run: Path, *, is_ours: bool = False) -> None:
    """Clean up after processes that are gone: restore a checkpoint that was being replaced, delete an unfinished one.
    is_ours: no other process can be writing checkpoints of this run, so those of unknown owners are left over too."""
    for path in run.glob(".*"):
        match = _LEFT.fullmatch(path.name)
        if match is None or not _is_left(match[2], is_ours=is_ours and match[1].startswith("checkpoint-")):
            continue
        target = run / match[1]
        if match[3] == "old" and is_checkpoint(path) and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_left(owner: str, *, is_ours: bool) -> bool:
    known = Owner.of_token(owner)
    if known is None:  # written by an earlier version, which recorded only the pid
        return is_ours or not owner.isdigit() or not psutil.pid_exists(int(owner))
    standing = known.standing()
    return standing == "gone" or (standing == "unknown" and is_ours)


def newest_checkpoint(run: Path, *, is_ours: bool = False) -> Checkpoint | None:
    """Read the checkpoint of a run folder with the most training steps, or if its state is damaged, the newest that is
    intact; None if there is none. is_ours: as in `clear_up`. Raises CheckpointError if none is intact."""
    clear_up(run, is_ours=is_ours)
    named = checkpoints_of(run)
    there = [step for step, path in named.items() if is_checkpoint(path)]
    newest = max(there, default=-1)
    for step in sorted(named):
        if step > newest:
            logger.warning(
                "%s is ignored: it has neither %s nor %s, like an incomplete copy",
                *(named[step], STATE_FILE, MANIFEST_FILE),
            )
    if newest < 0:
        return None
    try:
        return Checkpoint.read(named[newest])
    except CheckpointError as error:
        return _intact_before(named[newest], error)


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is, or was, a checkpoint: one that lost its state is damaged, not ignored."""
    return (path / STATE_FILE).is_file() or (path / MANIFEST_FILE).is_file()


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Return the folders of a run that are named like checkpoints, whatever is in them, by their training steps."""
    candidates = (
        (re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in run.glob("checkpoint-*") if path.is_dir()
    )
    return {int(match[1]): path for match, path in candidates if match is not None}


def set_later_aside(run: Path, checkpoint: Checkpoint | None) -> list[Path]:
    """Rename the checkpoints of a run folder that belong to another branch once training continues from `checkpoint`,
    so that a later `resume=auto` does not take them for the newest ones. None is deleted.

    checkpoint: None for training from the beginning. Returns the new paths, by steps.

    If it is killed halfway, the same call again completes it. Raises StorageError.
    """
    clear_up(run, is_ours=True)  # or one that was being replaced would come back later
    moved, step = [], 0 if checkpoint is None else checkpoint.step
    begun = None if checkpoint is None or not checkpoint.folder.exists() else checkpoint.folder
    try:
        # From the last one down: if killed in between, the run has lost its end, but has no gap.
        for number, path in sorted(checkpoints_of(run).items(), reverse=True):
            if number >= step and (begun is None or not path.samefile(begun)):
                moved.append(set_aside(path, "abandoned"))
    except OSError as error:
        raise StorageError(
            f"cannot rename the checkpoints of {run} that are later than step {step}: {error}; make the folder "
            "writable, or give another run_name"
        ) from error
    return moved[::-1]


def resumed_folder(resume: str | None, output_dir: str, run_name: str | None) -> Path | None:
    """Return the run folder to resume: that of run_name if `resume` is "auto", whether it exists or not; that of the
    given checkpoint, unless another run_name is given. None for a new run, also from a checkpoint that was set aside,
    because the rest of its folder belongs to the branch that continued."""
    if resume is None:
        return None
    named = None if run_name is None else Path(output_dir).absolute() / run_name
    if resume == "auto":
        return named
    beside = Path(resume).resolve().parent
    if re.fullmatch(ABANDONED, Path(resume).resolve().name):
        return None
    is_run = any((beside / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    if run_name is None:
        return beside if is_run else None
    is_named = named is not None and named.resolve() == beside
    return beside if is_named or (is_run and run_name == beside.name) else None


def find_checkpoint(
    resume: str | None, output_dir: str, run_name: str | None, *, is_ours: bool = False
) -> Checkpoint | None:
    """Read the checkpoint that `resume` means: a folder, or "auto" for the newest of the run (None if it has none yet).
    is_ours: as in `clear_up`. Raises CheckpointError for one that cannot be resumed."""
    if resume is None:
        return None
    if resume != "auto":
        return Checkpoint.read(Path(resume))
    run = Path(output_dir) / str(run_name)
    checkpoint = newest_checkpoint(run, is_ours=is_ours)
    if checkpoint is None:
        logger.warning("resume=auto: %s has no checkpoint yet; starting from the beginning", run)
    _tell_of_siblings(run, None if checkpoint is None else checkpoint.folder)
    return checkpoint


def _tell_of_siblings(run: Path, found: Path | None) -> None:
    """Warn of runs that got another folder because this name was taken, if one of them has more steps or a checkpoint
    that was written later. Their folders are not touched: another process may be writing there."""
    mine = (-1, -1) if found is None else (int(found.name.removeprefix("checkpoint-")), _written(found))
    for path in sorted(run.parent.glob(f"{glob.escape(run.name)}-*")):
        if not re.fullmatch(r"\d+", path.name.removeprefix(f"{run.name}-")):
            continue
        with contextlib.suppress(FileNotFoundError):  # one that is just being replaced
            step, theirs = max(checkpoints_of(path).items(), default=(-1, path))
            if step > mine[0] or (step >= 0 and _written(theirs) > mine[1]):
                logger.warning(
                    "resume=auto takes %s, but %s is newer; it was created because the name was taken. Set run_name=%r "
                    "to resume it",
                    *(found or f"nothing, for {run} has no checkpoint", theirs, path.name),
                )


def _written(checkpoint: Path) -> int:
    """Return the time at which a checkpoint was written, by its file system's clock."""
    return (checkpoint / STATE_FILE).stat().st_mtime_ns


def check_resumed(checkpoint: Checkpoint, *, is_auto: bool) -> Checkpoint:
    """Call `check_checkpoint`, and return the checkpoint to resume: if the newest one of a run is damaged, the newest
    that is intact, with a warning. One that the user has named is not replaced, and needs no manifest. Raises
    CheckpointError."""
    try:
        check_checkpoint(checkpoint.folder, needs_manifest=is_auto)
    except CheckpointError as error:
        if not is_auto:
            raise
        return _intact_before(checkpoint.folder, error)
    return checkpoint


def _intact_before(damaged: Path, error: CheckpointError) -> Checkpoint:
    """Return the newest checkpoint of a run that is intact, and say so. Raises CheckpointError if there is none: a run
    that begins again by itself would lose what can perhaps be repaired."""
    for path in (path for _, path in sorted(checkpoints_of(damaged.parent).items(), reverse=True) if path != damaged):
        with contextlib.suppress(CheckpointError):
            checkpoint = Checkpoint.read(path)
            check_checkpoint(path)
            break
    else:
        raise CheckpointError(f"{error}. No other checkpoint of {damaged.parent} is known to be intact") from error
    logger.warning(
        "resume=auto: going on from %s, the newest checkpoint that is intact, because %s. The damaged one is kept: the "
        "first step renames it",
        *(checkpoint, str(error).partition(". Use another checkpoint")[0]),
    )
    return checkpoint
