"""A Trainer's checkpoints: written when asked for, when due, and when a run ends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoint.base_model import BASE
from hybrid_rl.checkpoint.finding import clear_up
from hybrid_rl.checkpoint.reading import STATE_FILE
from hybrid_rl.config import to_dict
from hybrid_rl.errors import CheckpointError, ConfigError
from hybrid_rl.run.evaluating import Evaluating
from hybrid_rl.run.watch import LearningWatch

logger = logging.getLogger("hybrid_rl")


class Saving(Evaluating):
    """The base of Trainer that saves."""

    _watch: LearningWatch
    _base_record: dict[str, Any] | None = None  # of the base model of adapters, once it was looked for

    def save(self, folder: str | Path | None = None, *, merged: bool = False) -> Path:
        """Write a checkpoint: weights and tokenizer as `from_pretrained` reads them, optimizer, position in the data.

        A run with adapters writes the adapter as peft reads it, and names its base model; one that was passed as a
        module is written once, into the run folder. merged: write the whole model with the adapter merged into it
        instead, by itself: nothing can be resumed from it.

        folder: default `checkpoint-<step>`, or `merged-<step>`, in the run folder. It is written completely or not at
        all. Raises CheckpointError if it cannot be written.
        """
        self._require_idle("save")
        if merged and not self.config.lora.is_on:
            raise ConfigError("merged=True: this run has no adapters to merge; save() writes the whole model")
        if folder is None:
            self._log.check()
        name = f"{'merged' if merged else 'checkpoint'}-{self.global_step}"
        target = self.run_folder / name if folder is None else Path(folder)
        if not target.resolve().name:
            raise CheckpointError(f"a checkpoint cannot be {target} itself: give the name of a new folder inside it")
        state: dict[str, Any] = {"global_step": self.global_step, "num_tokens": self.num_tokens}
        state |= {"sampler": self._guard.data_position, "config": to_dict(self.config)}
        state |= {"changed": self._changes_state(), "rewards": self._run.reward_names}
        state |= {"best": self._best.state_dict(), "collector": self.collector.state_dict(self.global_step)}
        try:
            if merged:
                self.policy.save_merged(target.resolve())
            else:
                self.policy.save(target.resolve(), state | self._base())
        except BaseException:
            if self.policy.has_ended:  # no rank is left to delete its unfinished files
                clear_up(target.resolve().parent, is_ours=folder is None)
            raise
        self._log.display.message(f"saved {target}")
        if not merged:
            self._notify("on_save", self.global_step, target)
        return target

    def _base(self) -> dict[str, Any]:
        """Return what a checkpoint says of the base model of adapters."""
        if not self.config.lora.is_on:
            return {}
        if self._base_record is None:
            self._base_record = self.policy.keep_base(self._run.choice.path, self.run_folder)
        return {BASE: self._base_record}

    def _save_now(self, *, final: bool) -> None:
        """Save a checkpoint. A failure (disk full) does not end the run: the next step tries again, as long as there
        are ranks."""
        if self._watch.is_broken:
            logger.warning("step %d is not saved: its weights are not finite", self.global_step)
            return
        try:
            with self._timeline.phase("checkpoint"):
                target = self.save()
        except CheckpointError as error:
            if final or self.policy.has_ended:
                raise
            logger.warning("%s; trying again after the next step", error)
            return
        self._save_due = False
        self._forget_old(target, self._best.checkpoint)

    def _keep_last_step(self) -> None:
        """Save the last complete step, if checkpoints were asked for and it has none yet."""
        saved = (self.run_folder / f"checkpoint-{self.global_step}" / STATE_FILE).exists()
        if self.config.save_steps is not None and self.global_step and not self._guard.is_torn and not saved:
            self._save_now(final=True)
