"""The record of turns that agents have finished, as the driver sees it: which of it a run may use, and for how long."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hybrid_rl.agents.turn_record import STEP_FOLDER, TurnFiles
from hybrid_rl.batch import AnyBatch
from hybrid_rl.checkpoint.finding import checkpoints_of, is_checkpoint
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.process.files import write_text

logger = logging.getLogger("hybrid_rl")

HEAD_FILE, BATCH_FILE = "record.json", "batch"


class RunTurns:
    """The folder of a run's record. It is used again by a run that goes on where it was written: from the newest
    checkpoint of the run folder, or from the one at which a branch began that has no other yet.

    Nothing on the disk changes before `begin`, so that a Trainer which trains nothing leaves it as it is.
    """

    def __init__(self, run_folder: Path) -> None:
        self._run_folder, self._folder = run_folder, run_folder / "turns"
        self._files: TurnFiles | None = None
        self._goes_on, self._has_begun = False, False
        self._since: str | None = None  # the folder of the checkpoint that the run goes on from
        self._has_failed = False

    def start(self, checkpoint: Checkpoint | None) -> TurnFiles:
        """Return where ranks write, of a run that goes on from a checkpoint; None = from the beginning."""
        head = self._head()
        self._since = None if checkpoint is None else str(checkpoint.folder.resolve())
        there = {step: path for step, path in checkpoints_of(self._run_folder).items() if is_checkpoint(path)}
        newest = str(there[max(there)].resolve()) if there else None
        is_newest = self._since is not None and self._since == newest
        self._goes_on = bool(head) and (is_newest or ("since" in head and self._since == head["since"]))
        self._has_begun = False
        self._files = TurnFiles(self._folder, head["run"] if self._goes_on else uuid.uuid4().hex[:12])
        return self._files

    def begin(self) -> None:
        """Make the folder, before the first training step: what this run may not use is deleted, which is logged."""
        if self._files is None or self._has_begun:
            return
        with self._told_of_disk():  # and tried again before the next step
            if not self._goes_on:
                if self._steps():
                    logger.warning(
                        "finished turns in %s are deleted: they belong to training after another checkpoint",
                        self._folder,
                    )
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(exist_ok=True)
                self._write_head({"run": self._files.run, "since": self._since})
            self._has_begun = True

    def settle(self, step: int, batch: AnyBatch) -> bool:
        """Look at a step's batch: whether an earlier life of the run had another one, or other rewards for it. Then the
        weights become others, and all that is recorded is void: it is deleted, which is logged."""
        if self._files is None or not self._has_begun:
            return False
        columns = [batch[name].double().cpu() for name in ("group", "completion_length", "rewards")]
        digest = hashlib.blake2b(torch.stack(columns).numpy().tobytes(), digest_size=12).hexdigest()
        is_void = False
        with self._told_of_disk():
            path = self._folder / f"{STEP_FOLDER}{step}" / BATCH_FILE
            if path.is_file() and path.read_text(encoding="utf-8") != digest:
                is_void = True
                logger.warning(
                    "step %d has another batch, or other rewards, than before the run was interrupted, so its weights "
                    "become others: the turns that were recorded then are deleted",
                    step,
                )
                self._delete(self._steps())
            path.parent.mkdir(exist_ok=True)
            write_text(path, digest)
        return is_void

    def saved(self, first_needed: int) -> None:
        """Delete what a new checkpoint makes unnecessary. first_needed: the first step whose turns it may need."""
        if self._files is None or not self._has_begun:
            return
        with self._told_of_disk():
            self._delete([step for step in self._steps() if step < first_needed])
            if "since" in self._head():
                self._write_head({"run": self._files.run})

    @contextlib.contextmanager
    def _told_of_disk(self) -> Iterator[None]:
        """Warn, once, if the folder cannot be used in the block: training goes on without it."""
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "%s cannot be used (%s): training goes on, but after a kill conversations begin again from their "
                    "prompts; make room on its disk, or mount that again",
                    *(self._folder, error),
                )

    def _head(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self._folder / HEAD_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def _write_head(self, head: dict[str, Any]) -> None:
        write_text(self._folder / HEAD_FILE, json.dumps(head))

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix(STEP_FOLDER) for path in self._folder.glob(f"{STEP_FOLDER}*"))
        return [int(name) for name in names if name.isdigit()]

    def _delete(self, steps: list[int]) -> None:
        for step in steps:
            shutil.rmtree(self._folder / f"{STEP_FOLDER}{step}", ignore_errors=True)
