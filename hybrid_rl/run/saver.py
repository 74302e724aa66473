"""Checkpoints of a run: written when asked for, when due, and when the run ends."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoint.background import GIVEN_UP
from hybrid_rl.checkpoint.finding import clear_up
from hybrid_rl.checkpoint.reading import BASE, STATE_FILE
from hybrid_rl.checkpoint.rotation import delete_oldest
from hybrid_rl.checkpoint.writing import failure
from hybrid_rl.config import to_dict
from hybrid_rl.errors import CheckpointError, ConfigError, do_all
from hybrid_rl.metrics.metric_sums import now
from hybrid_rl.process.stopping import Stop, note_checkpoint
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.settings import Settings
from hybrid_rl.run.tenancy import Tenancy

logger = logging.getLogger("hybrid_rl")

WAIT_SECONDS = 0.2  # of one call to the ranks, which cannot be interrupted


class Saver:
    """Writes the checkpoints of a run.

    notify: calls a hook of the callbacks. stop: what may ask for the end of the `fit()` under way.
    """

    def __init__(self, crew: Crew, tenancy: Tenancy, settings: Settings, notify: Callable[..., None]) -> None:
        self._crew, self._position, self._log = crew, crew.position, crew.log
        self._settings, self._tenancy, self._notify = settings, tenancy, notify
        self.stop = Stop()
        self._base_record: dict[str, Any] | None = None  # of the base model of adapters, once it was looked for
        self._saving: Path | None = None  # the checkpoint that is written in the background
        self._saved_to: Path | None = None  # the folder of the last `save()`
        self._turns_needed = 0  # the first training step whose turns the last checkpoint may need
        self._failure = ""  # why the last one could not be written
        self._has_told_of_memory = False
        self._seconds: dict[str, float] = {}

    def save(self, folder: str | Path | None = None, *, merged: bool = False) -> Path:
        """Write a checkpoint, completely or not at all, as `Trainer.save` says."""
        self._tenancy.require_idle("save")
        if merged and not self._crew.config.lora.is_on:
            raise ConfigError("merged=True: this run has no adapters to merge; save() writes the whole model")
        name = f"{'merged' if merged else 'checkpoint'}-{self._position.step}"
        target = self._crew.folder / name if folder is None else Path(os.path.expanduser(folder))
        if not target.resolve().name:
            raise CheckpointError(f"a checkpoint cannot be {target} itself: give the name of a new folder inside it")
        with self._after_save():
            if folder is None:
                self._check_folder(target)
            with self._cleared_up(target, is_ours=folder is None):
                if merged:
                    self._crew.policy.save_merged(target.resolve())
                else:
                    self._crew.policy.save(target.resolve(), *self._saved_state())
            self._log.flush(self._crew.policy.lost_samples())
            self._log.display.message(f"saved {target}")
            if not merged:
                self._saved_to = target.resolve()
                self._notify("on_save", self._position.step, target)
        return target

    @contextlib.contextmanager
    def _after_save(self) -> Iterator[None]:
        """Wait for the checkpoint that is written in the background before the block, which saves. If a callback fails
        because that one is there, its error is raised after the block, so that it does not cost another checkpoint."""
        failure: Exception | None = None
        try:
            self.wait()
        except Exception as error:
            if self._crew.policy.has_ended:
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
            if self._crew.policy.has_ended:  # no rank is left to delete its unfinished files
                clear_up(target.resolve().parent, is_ours=is_ours)
            raise

    def _saved_state(self) -> tuple[dict[str, Any], list[str] | None]:
        """Return what the driver puts into a checkpoint, and what ranks hold that write none."""
        crew, position = self._crew, self._position
        if crew.run.agents is not None:
            self._turns_needed = min(crew.generating.oldest_held(position.step))
        state: dict[str, Any] = {"global_step": position.step, "num_tokens": position.num_tokens}
        state |= {"sampler": crew.guard.data_position, "config": to_dict(crew.config)}
        state |= {"changed": self._settings.changes_state(), "rewards": crew.run.rewards.entries.names}
        state |= {"best": crew.best.state_dict(), "collector": crew.collector.state_dict(position.step)}
        state |= ({} if position.owed is None else {"owed": dict(position.owed)}) | self._base()
        return state, crew.generating.held_apart(position.step)

    def _base(self) -> dict[str, Any]:
        """Return what a checkpoint says of the base model of adapters."""
        if not self._crew.config.lora.is_on:
            return {}
        if self._base_record is None:
            self._base_record = self._crew.policy.keep_base(self._crew.run.choice.path, self._crew.folder)
        return {BASE: self._base_record}

    def _save_now(self, *, final: bool) -> None:
        """Save a checkpoint: inside of `fit()` in the background, if that is wanted; after its last step, and after a
        step by hand, which may be the last, at once. A failure (disk full) does not end the run: the next step tries
        again, as long as there are ranks."""
        if self._crew.watch.is_broken:
            logger.warning("step %d is not saved: its weights are not finite", self._position.step)
            return
        goes_on = "fit()" in self._tenancy.work and not final and self._position.step < self._position.max_steps
        is_waited_for = not goes_on or not self._crew.config.checkpoints.async_save
        try:
            with self._stalled(), self._after_save():
                if is_waited_for or not self._begin_save():
                    target = self.save()
                    self._position.save_due = False
                    self._note_saved(target)
        except CheckpointError as error:
            if final or self._crew.policy.has_ended:
                raise
            self._note_failure(error)

    def save_if_due(self) -> None:
        """Save after a step if that is due, or if an earlier attempt has failed."""
        position = self._position
        do_all(
            self.look,
            lambda: self._save_now(final=False) if position.save_due and not position.is_unevaluated else None,
        )

    @contextlib.contextmanager
    def _stalled(self) -> Iterator[None]:
        """Count the seconds inside the block, in which training waits for a checkpoint."""
        start = now()
        try:
            with self._crew.timeline.phase("checkpoint"):
                yield
        finally:
            self._seconds["timing/checkpoint"] = self._seconds.get("timing/checkpoint", 0.0) + now() - start

    def _begin_save(self) -> bool:
        """Begin to write a checkpoint in the background. Returns whether that has begun; False if there is too little
        host memory, which is said once. Raises CheckpointError."""
        target = self._crew.folder / f"checkpoint-{self._position.step}"
        self._check_folder(target)
        missing, self._saving = "", target  # before the call: a Ctrl-C that waited for its end hides what it returned
        try:
            with self._cleared_up(target, is_ours=True):
                missing = self._crew.policy.begin_save(target.resolve(), *self._saved_state())
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
        self._position.save_due = False
        return True

    def look(self, wait_seconds: float = 0.0) -> None:
        """See how far the checkpoint is that is written in the background. Once it is there, it is announced; if it
        failed, that is a warning, and the next step tries again."""
        target = self._saving
        if target is None or self._crew.policy.has_ended:
            return
        with self._cleared_up(target, is_ours=True):
            ranks = self._crew.policy.save_progress(wait_seconds)
            errors = [(rank, progress.error) for rank, progress in enumerate(ranks) if progress.error]
            if not errors and not all(progress.is_done for progress in ranks):
                return
            self._saving = None
            self._crew.policy.end_save(is_given_up=bool(errors))
        if errors:
            # The leader gives up if another rank has failed, and if itself fails, others find their folder gone.
            rank, text = next((error for error in errors if error[1] != GIVEN_UP), errors[0])
            self._position.save_due = True
            self._note_failure(CheckpointError(failure(target, f"rank {rank}: {text}" if len(ranks) > 1 else text)))
            return
        self._seconds["timing/checkpoint_write"] = max(progress.seconds for progress in ranks)
        self._log.display.message(f"saved {target}")
        self._note_saved(target)
        self._notify("on_save", int(target.name.removeprefix("checkpoint-")), target)

    def wait(self) -> None:
        """Wait until the checkpoint that is written in the background is there, or has failed."""
        while self._saving is not None and not self._crew.policy.has_ended:
            self.look(WAIT_SECONDS)

    def finish(self) -> None:
        """Wait in the same way before the ranks end. Afterwards nothing is written any more, or the ranks are gone."""
        target = self._saving
        try:
            self.wait()
        except Exception as error:  # what closes must not fail; the ranks may be gone
            if target is not None and (target / STATE_FILE).is_file():
                cause = f"{type(error).__name__}: {error}"
                logger.warning("%s is there; what was to be done after it failed: %s", target, cause)
            else:
                logger.warning("%s was being written, and is not there: %s", target, error)
        finally:
            self._saving = None

    def _note_failure(self, error: CheckpointError) -> None:
        """Warn of a checkpoint that could not be written, once as long as it is for the same reason."""
        reason = re.sub(r"\d+", "", str(error))  # of another step it is still the same
        if reason != self._failure:
            logger.warning("%s; trying again after the next step", error)
        self._failure = reason

    def _note_saved(self, target: Path) -> None:
        """Go on after a checkpoint that is there."""
        note_checkpoint()
        self._failure = ""
        self._crew.turns.saved(self._turns_needed)
        resumed = self._crew.run.checkpoint
        kept = (target, self._crew.best.kept, None if resumed is None else resumed.folder)
        delete_oldest(self._crew.folder, self._crew.config.checkpoints.save_total_limit, kept)

    @property
    def saved_folder(self) -> Path | None:
        """The folder that has the present step; None if there is none."""
        own = self._crew.folder / f"checkpoint-{self._position.step}"
        places = [own, *([self._saved_to] if self._saved_to is not None else [])]
        return next((place for place in places if (place / STATE_FILE).is_file()), None)

    def metrics(self) -> dict[str, float]:
        """Return the seconds of checkpoints since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def keep_last_step(self) -> None:
        """Save the last complete step, if checkpoints or a stop were asked for and it has none yet."""
        with self._after_save():
            saved = (self._crew.folder / f"checkpoint-{self._position.step}" / STATE_FILE).exists()
            is_wanted = self._crew.config.save_steps is not None or bool(self.stop.reason)
            if is_wanted and self._position.step and not self._crew.guard.is_torn and not saved:
                self._save_now(final=True)

    def end(self, *, keeps_last: bool) -> None:
        """Save what is still due at the end of `fit()`. keeps_last: also the last step, as `keep_last_step`."""
        with self._after_save():
            if self._position.save_due:
                self._save_now(final=True)
            elif keeps_last:
                self.keep_last_step()
