"""The end of a `fit()` before its last step: asked for by a callback, an evaluation, a signal or a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hybrid_rl.checkpoint.finding import checkpoints_of
from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import CheckpointError, ConfigError, DivergedError, NoSignalError
from hybrid_rl.process.stopping import DEADLINE, RunStopped, Stop, is_own_process, seconds_of, seconds_since_start
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.restarts import Loss
from hybrid_rl.run.saver import Saver
from hybrid_rl.run.tenancy import Tenancy


class Stopper:
    """Knows whether the `fit()` under way is to end, and ends the run as it should if it was broken off.

    stop: what asks for the end from outside. is_asked: whether `fit()` is to end after the step that is running.
    """

    def __init__(self, crew: Crew, tenancy: Tenancy, saver: Saver) -> None:
        self._crew, self._position, self._log = crew, crew.position, crew.log
        self._tenancy, self._saver = tenancy, saver
        self.stop = Stop()
        self.is_asked = False
        self._begun = 0  # the training step after which the `fit()` under way began

    def begin(self, *, is_whole: bool) -> None:
        """Begin a `fit()`. is_whole: it is to train all of the run, which may have been stopped early already."""
        self._begun, self.is_asked = self._position.step, False
        if is_whole and self._crew.best.is_over:
            self._log.display.message(self._crew.best.reason())
            self.is_asked = True

    def ask(self) -> None:
        """End `fit()` after the step that is running; nothing outside of `fit()`."""
        self.is_asked = bool(self._tenancy.work)

    def look(self) -> None:
        """End `fit()` if its last evaluation calls for that."""
        if self.ends_early:
            self.is_asked = True
            self._log.display.message(self._crew.best.reason())

    @property
    def ends_early(self) -> bool:
        """Whether an evaluation of this `fit()` calls for its end. Those before it do not: `fit(steps=20)` goes on
        after them, also if a restart brings them back."""
        return self._crew.best.is_over and self._crew.best.evaluated_step > self._begun

    def has_steps(self, last: int | None) -> bool:
        """Whether `fit()` has a step to train, up to this one; None = max_steps, which may change meanwhile."""
        return self._position.step < (self._position.max_steps if last is None else last) and not self.is_asked

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """End the block when a signal or the deadline asks for it, if the run is to listen to them."""
        self.stop = self._saver.stop = stop_of(self._crew.config)
        self.stop.has_checkpoint = self._crew.run.checkpoint is not None
        if note := self.stop.without_interrupt():
            self._log.display.message(note)
        with self.stop.watching():
            yield

    def end(self, failure: BaseException) -> None:
        """Raise the error that ended a run, after saving the last complete step if that step is sound."""
        if self.stop.reason:
            self._end_stopped(failure)
        self._saver.finish()
        has_ended = self._crew.policy.has_ended
        if isinstance(failure, (KeyboardInterrupt, NoSignalError, DivergedError)) and not has_ended:
            self._saver.keep_last_step()
        if isinstance(failure, RunStopped):
            self._log.display.message(
                f"stopped by {failure.reason} after training step {self._position.step}: nothing was saved, because "
                "save_steps is not set"
            )
        if isinstance(failure, KeyboardInterrupt):
            lost = "; the ranks have ended: fit() makes them again" if self._tenancy.lost is not None else ""
            self._log.display.message(
                f"interrupted after training step {self._position.step}; results are in {self._crew.folder}{lost}"
            )
        raise failure

    def _end_stopped(self, failure: BaseException) -> None:
        """Save the last complete step, because a stop was requested. failure: which broke off the work: a
        KeyboardInterrupt, or an error if the same signal ended processes that the work needs.

        Raises KeyboardInterrupt, CheckpointError if nothing can be saved, and ConfigError if save_before leaves no time
        for a step, so that to try again would be of no use.
        """
        step, metrics = self._position.step, self._position.metrics
        message, unsaved = f"stopped by {self.stop.reason} after training step {step}", None
        if not isinstance(failure, KeyboardInterrupt):
            message += f" ({Loss.of(failure, step).cause})"
        if self._crew.guard.is_torn or self._crew.policy.has_ended:
            message += "; the ranks have ended, so that nothing is saved now"
        else:
            try:
                self._saver.keep_last_step()
            except CheckpointError as error:  # a full disk; there may be an earlier checkpoint to go on from
                unsaved = error
                message += f"; that step is not saved: {error}"
        if not metrics:
            message += "; nothing was trained since the start of this process"
        # Before its first step a resumed run leaves newer checkpoints where they are; they may be damaged.
        saved = checkpoints_of(self._crew.folder) if self._log.is_taken_up else {}
        newest = saved[max(saved)] if saved else self._crew.run.checkpoint
        if unsaved is not None and newest is None:
            raise unsaved
        where = f"resume from {newest}" if newest is not None else "there is no checkpoint yet"
        self._log.display.message(f"{message}; {where}")
        if self.stop.reason == DEADLINE and not (newest is not None and metrics):
            why = "no training step was complete" if not metrics else "no checkpoint could be saved"
            raise ConfigError(
                f"save_before={self._crew.config.save_before!r} was over {seconds_since_start():.0f} s after the start "
                f"of this process, and {why} until then, so that the same command would end like this again and again; "
                "set a larger save_before, and give the job more time (timing/step says what a step takes)"
            ) from failure
        self.stop.has_checkpoint = newest is not None
        raise KeyboardInterrupt from failure


def stop_of(config: TrainerConfig) -> Stop:
    """Return what may stop a run with this configuration."""
    listens = config.enable_jit_checkpoint or (is_own_process() and config.save_steps is not None)
    if config.save_before is None:
        return Stop(handles_signals=listens)
    return Stop(handles_signals=listens, seconds=seconds_of(config.save_before) - seconds_since_start())
