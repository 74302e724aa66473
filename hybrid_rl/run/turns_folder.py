"""The record of turns that agents have finished, as the driver sees it: which of it a run may use, and for how long."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from pathlib import Path
from typing import Any

from torch import Tensor

from hybrid_rl.agents.turn_record import STEP_FOLDER, TurnFiles
from hybrid_rl.checkpoint.finding import checkpoints_of
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.process.files import write_text

logger = logging.getLogger("hybrid_rl")

HEAD_FILE, REWARDS_FILE = "record.json", "rewards"


class RunTurns:
    """The folder of a run's record. It is used again by a run that goes on where it was written: from the newest
    checkpoint of the run folder, or from the one at which a branch began that has no other yet.

    Nothing on the disk changes before `begin`, so that a Trainer which trains nothing leaves it as it is.
    """

    def __init__(self, run_folder: Path) -> None:
        self._run_folder, self._folder = run_folder, run_folder / "turns"
        self._files: TurnFiles | None = None
        self._goes_on, self._has_begun = False, False
        self._since: int | None = None

    def start(self, checkpoint: Checkpoint | None) -> TurnFiles:
        """Return where ranks write, of a run that goes on from a checkpoint; None = from the beginning."""
        head = self._head()
        newest = max(checkpoints_of(self._run_folder), default=None)
        is_here = checkpoint is None or checkpoint.folder.resolve().parent == self._run_folder.resolve()
        self._since = None if checkpoint is None else checkpoint.step
        self._goes_on = bool(head) and is_here and self._since in (newest, head.get("since", newest))
        self._has_begun = False
        self._files = TurnFiles(self._folder, head["run"] if self._goes_on else uuid.uuid4().hex[:12])
        return self._files

    def begin(self) -> None:
        """Make the folder, before the first training step: what this run may not use is deleted, which is logged."""
        if self._files is None or self._has_begun:
            return
        self._has_begun = True
        if self._goes_on:
            return
        if any(self._folder.glob(f"{STEP_FOLDER}*")):
            logger.warning(
                "finished turns in %s are deleted: they belong to training after another checkpoint", self._folder
            )
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_head({"run": self._files.run, "since": self._since})

    def settle(self, step: int, rewards: Tensor) -> None:
        """Look at the rewards of a step's batch. If an earlier life of the run had others for it, later steps will have
        other weights: what they have recorded is deleted, which is logged."""
        if self._files is None:
            return
        path = self._folder / f"{STEP_FOLDER}{step}" / REWARDS_FILE
        digest = hashlib.blake2b(rewards.double().cpu().numpy().tobytes(), digest_size=12).hexdigest()
        if path.is_file() and path.read_text(encoding="utf-8") != digest:
            later = [made for made in self._steps() if made > step]
            if later:
                logger.warning(
                    "step %d has other rewards than before the run was interrupted: turns that were finished in later "
                    "steps are deleted, because they were made by other weights",
                    step,
                )
            self._delete(later)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, digest)

    def saved(self, first_needed: int) -> None:
        """Delete what a new checkpoint makes unnecessary. first_needed: the first step whose turns it may need."""
        if self._files is None or not self._has_begun:
            return
        self._delete([step for step in self._steps() if step < first_needed])
        if self._head().get("since") is not None:
            self._write_head({"run": self._files.run})

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
