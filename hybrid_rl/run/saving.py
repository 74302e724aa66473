"""A Trainer's checkpoints: written when asked for, when due, and when a run ends."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoint.background import GIVEN_UP
from hybrid_rl.checkpoint.base_model import BASE
from hybrid_rl.checkpoint.finding import clear_up
from hybrid_rl.checkpoint.reading import STATE_FILE
from hybrid_rl.checkpoint.writing import failure
from hybrid_rl.config import to_dict
from hybrid_rl.errors import CheckpointError, ConfigError, do_all
from hybrid_rl.metrics import now
from hybrid_rl.process.stopping import Stop, note_checkpoint
from hybrid_rl.run.evaluating import Evaluating
from hybrid_rl.run.watch import LearningWatch

logger = logging.getLogger("hybrid_rl")

WAIT_SECONDS = 0.2  # of one call to the ranks, which cannot be interrupted


class Saving(Evaluating):
    """The base of Trainer that saves."""

    _watch: LearningWatch
    _stop = Stop()  # what asks for the end of the `fit()` under way
    _base_record: dict[str, Any] | None = None  # of the base model of adapters, once it was looked for
    _saving: Path | None = None  # the checkpoint that is written in the background
    _saved_to: Path | None = None  # the folder of the last `save()`
    _save_failure = ""  # why the last one could not be written
    _has_told_of_memory = False

    def __init__(self) -> None:
        super().__init__()
        self._save_seconds: dict[str, float] = {}

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
        name = f"{'merged' if merged else 'checkpoint'}-{self.global_step}"
        target = self.run_folder / name if folder is None else Path(folder)
        if not target.resolve().name:
            raise CheckpointError(f"a checkpoint cannot be {target} itself: give the name of a new folder inside it")
        with self._after_save():
            if folder is None:
                self._check_folder(target)
            with self._cleared_up(target, is_ours=folder is None):
                if merged:
                    self.policy.save_merged(target.resolve())
                else:
                    self.policy.save(target.resolve(), self._saved_state())
            self._log.flush(self.policy.lost_samples())
            self._log.display.message(f"saved {target}")
            if not merged:
                self._saved_to = target.resolve()
                self._notify("on_save", self.global_step, target)
        return target

    @contextlib.contextmanager
    def _after_save(self) -> Iterator[None]:
        """Wait for the checkpoint that is written in the background before the block, which saves. If a callback fails
        because that one is there, its error is raised after the block, so that it does not cost another checkpoint."""
        failure: Exception | None = None
        try:
            self._wait_for_save()
        except Exception as error:
            if self.policy.has_ended:
                raise
            failure = error
        try:
            yield
        except Exception as error:
            if failure is None:
                raise
            failure.add_note(f"then {type(error).__name__}: {error}")
        if failure is not None:
            raise failure

    def _check_folder(self, target: Path) -> None:
        """Require the run folder. Raises CheckpointError if its disk is not there, and as `RunLog.check`."""
        self._log.check()
        if missing := self._log.missing_disk():
            raise CheckpointError(failure(target, missing))

    @contextlib.contextmanager
    def _cleared_up(self, target: Path, *, is_ours: bool) -> Iterator[None]:
        """Delete what ranks that end inside the block leave of a checkpoint."""
        try:
            yield
        except BaseException:
            if self.policy.has_ended:  # no rank is left to delete its unfinished files
                clear_up(target.resolve().parent, is_ours=is_ours)
            raise

    def _saved_state(self) -> dict[str, Any]:
        """Return what the driver puts into a checkpoint."""
        state: dict[str, Any] = {"global_step": self.global_step, "num_tokens": self.num_tokens}
        state |= {"sampler": self._guard.data_position, "config": to_dict(self.config)}
        state |= {"changed": self._changes_state(), "rewards": self._run.reward_names}
        state |= {"best": self._best.state_dict(), "collector": self.collector.state_dict(self.global_step)}
        return state | ({} if self._owed is None else {"owed": dict(self._owed)}) | self._base()

    def _base(self) -> dict[str, Any]:
        """Return what a checkpoint says of the base model of adapters."""
        if not self.config.lora.is_on:
            return {}
        if self._base_record is None:
            self._base_record = self.policy.keep_base(self._run.choice.path, self.run_folder)
        return {BASE: self._base_record}

    def _save_now(self, *, final: bool) -> None:
        """Save a checkpoint: inside of `fit()` in the background, if that is wanted; after its last step, and after a
        step by hand, which may be the last, at once. A failure (disk full) does not end the run: the next step tries
        again, as long as there are ranks."""
        if self._watch.is_broken:
            logger.warning("step %d is not saved: its weights are not finite", self.global_step)
            return
        goes_on = "fit()" in self._work and not final and self.global_step < self.max_steps
        is_waited_for = not goes_on or not self.config.checkpoints.async_save
        try:
            with self._stalled(), self._after_save():
                if is_waited_for or not self._begin_save():
                    target = self.save()
                    self._save_due = False
                    self._note_saved(target)
        except CheckpointError as error:
            if final or self.policy.has_ended:
                raise
            self._note_failure(error)

    def _save_if_due(self) -> None:
        """Save after a step if that is due, or if an earlier attempt has failed."""
        do_all(
            self._look_at_save,
            lambda: self._save_now(final=False) if self._save_due and not self._is_unevaluated else None,
        )

    @contextlib.contextmanager
    def _stalled(self) -> Iterator[None]:
        """Count the seconds inside the block, in which training waits for a checkpoint."""
        start = now()
        try:
            with self._timeline.phase("checkpoint"):
                yield
        finally:
            self._save_seconds["timing/checkpoint"] = self._save_seconds.get("timing/checkpoint", 0.0) + now() - start

    def _begin_save(self) -> bool:
        """Begin to write a checkpoint in the background. Returns whether that has begun; False if there is too little
        host memory, which is said once. Raises CheckpointError."""
        target = self.run_folder / f"checkpoint-{self.global_step}"
        self._check_folder(target)
        missing, self._saving = "", target  # before the call: a Ctrl-C that waited for its end hides what it returned
        try:
            with self._cleared_up(target, is_ours=True):
                missing = self.policy.begin_save(target.resolve(), self._saved_state())
        except Exception:
            self._saving = None
            raise
        if missing:
            self._saving = None
            if not self._has_told_of_memory:
                logger.warning(
                    "checkpoints are not written in the background: their copy in host memory would take %s. Training "
                    "waits for the disk instead; checkpoints.async_save=false says the same without this warning",
                    missing,
                )
            self._has_told_of_memory = True
            return False
        self._save_due = False
        return True

    def _look_at_save(self, wait_seconds: float = 0.0) -> None:
        """See how far the checkpoint is that is written in the background. Once it is there, it is announced; if it
        failed, that is a warning, and the next step tries again."""
        target = self._saving
        if target is None or self.policy.has_ended:
            return
        with self._cleared_up(target, is_ours=True):
            ranks = self.policy.save_progress(wait_seconds)
            errors = [(rank, one.error) for rank, one in enumerate(ranks) if one.error]
            if not errors and not all(one.is_done for one in ranks):
                return
            self._saving = None
            self.policy.end_save(is_given_up=bool(errors))
        if errors:
            # The leader gives up if another rank has failed, and if itself fails, others find their folder gone.
            rank, text = next((one for one in errors if one[1] != GIVEN_UP), errors[0])
            self._save_due = True
            self._note_failure(CheckpointError(failure(target, f"rank {rank}: {text}" if len(ranks) > 1 else text)))
            return
        self._save_seconds["timing/checkpoint_write"] = max(one.seconds for one in ranks)
        self._log.display.message(f"saved {target}")
        self._note_saved(target)
        self._notify("on_save", int(target.name.removeprefix("checkpoint-")), target)

    def _wait_for_save(self) -> None:
        """Wait until the checkpoint that is written in the background is there, or has failed."""
        while self._saving is not None and not self.policy.has_ended:
            self._look_at_save(WAIT_SECONDS)

    def _finish_save(self) -> None:
        """Wait in the same way before the ranks end. Afterwards nothing is written any more, or the ranks are gone."""
        target = self._saving
        try:
            self._wait_for_save()
        except Exception as error:  # what closes must not fail; the ranks may be gone
            if target is not None and (target / STATE_FILE).is_file():
                told = f"{type(error).__name__}: {error}"
                logger.warning("%s is there; what was to be done after it failed: %s", target, told)
            else:
                logger.warning("%s was being written, and is not there: %s", target, error)
        finally:
            self._saving = None

    def _note_failure(self, error: CheckpointError) -> None:
        """Warn of a checkpoint that could not be written, once as long as it is for the same reason."""
        reason = re.sub(r"\d+", "", str(error))  # of another step it is still the same
        if reason != self._save_failure:
            logger.warning("%s; trying again after the next step", error)
        self._save_failure = reason

    def _note_saved(self, target: Path) -> None:
        """Go on after a checkpoint that is there."""
        note_checkpoint()
        self._save_failure = ""
        self._forget_old(target, self._best.kept)

    def _save_metrics(self) -> dict[str, float]:
        """Return the seconds of checkpoints since the last call."""
        found, self._save_seconds = self._save_seconds, {}
        return found

    def _keep_last_step(self) -> None:
        """Save the last complete step, if checkpoints or a stop were asked for and it has none yet."""
        with self._after_save():
            self._save_last_step()

    def _end_saves(self, *, keeps_last: bool) -> None:
        """Save what is still due at the end of `fit()`. keeps_last: also the last step, as `_keep_last_step`."""
        with self._after_save():
            if self._save_due:
                self._save_now(final=True)
            elif keeps_last:
                self._keep_last_step()

    def _save_last_step(self) -> None:
        saved = (self.run_folder / f"checkpoint-{self.global_step}" / STATE_FILE).exists()
        is_wanted = self.config.save_steps is not None or bool(self._stop.reason)
        if is_wanted and self.global_step and not self._guard.is_torn and not saved:
            self._save_now(final=True)
