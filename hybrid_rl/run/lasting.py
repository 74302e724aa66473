"""Runs that last: workers that are lost are made again, and requests to stop are followed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoint.finding import check_resumed, newest_checkpoint
from hybrid_rl.checkpoint.reading import read_state
from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import CheckpointError, ConfigError, DivergedError, HybridRLError, NoSignalError
from hybrid_rl.process.stopping import DEADLINE, RunStopped, Stop, is_own_process, seconds_of, seconds_since_start
from hybrid_rl.run.others import steps_of
from hybrid_rl.run.prepare import Run
from hybrid_rl.run.restarts import Loss, Restarts
from hybrid_rl.run.saving import Saving

logger = logging.getLogger("hybrid_rl")


class Lasting(Saving):
    """The base of Trainer whose `fit()` goes on after a loss of ranks, and ends when it is asked to from outside."""

    _restarts: Restarts
    _workers: contextlib.ExitStack  # ends the workers when it is closed; used again
    _begun_at: tuple[dict[str, Any], int]  # position in the data, and training steps of the module, at the start

    def _begin(self, run: Run) -> None:
        """Start the workers, and put them where the checkpoint is from which the run resumes."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------ stopping

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """End the block when a signal or the deadline asks for it, if the run is to listen to them."""
        self._stop = stop_of(self.config)
        self._stop.has_checkpoint = self._run.resume is not None
        if note := self._stop.without_interrupt():
            self._log.display.message(note)
        with self._stop.watching():
            yield

    def _end_run(self, failure: BaseException) -> None:
        """Raise the error that ended a run, after saving the last complete step if that step is sound."""
        if self._stop.reason:
            self._end_stopped(failure)
        self._finish_save()
        if isinstance(failure, (KeyboardInterrupt, NoSignalError, DivergedError)) and not self.policy.has_ended:
            self._keep_last_step()
        if isinstance(failure, RunStopped):
            self._log.display.message(
                f"stopped by {failure.reason} after training step {self.global_step}: nothing was saved, because "
                "save_steps is not set"
            )
        if isinstance(failure, KeyboardInterrupt):
            lost = "; the ranks have ended: fit() makes them again" if self._lost is not None else ""
            self._log.display.message(
                f"interrupted after training step {self.global_step}; results are in {self.run_folder}{lost}"
            )
        raise failure

    def _end_stopped(self, failure: BaseException) -> None:
        """Save the last complete step, because a stop was requested. failure: which broke off the work: a
        KeyboardInterrupt, or an error if the same signal ended processes that the work needs.

        Raises KeyboardInterrupt, CheckpointError if nothing can be saved, and ConfigError if save_before leaves no time
        for a step, so that to try again would be of no use.
        """
        told, unsaved = f"stopped by {self._stop.reason} after training step {self.global_step}", None
        if not isinstance(failure, KeyboardInterrupt):
            told += f" ({Loss.of(failure, self.global_step).cause})"
        if self._guard.is_torn or self.policy.has_ended:
            told += "; the ranks have ended, so that nothing is saved now"
        else:
            try:
                self._keep_last_step()
            except CheckpointError as error:  # a full disk; there may be an earlier checkpoint to go on from
                unsaved = error
                told += f"; that step is not saved: {error}"
        if not self._last_metrics:
            told += "; nothing was trained since the start of this process"
        # Before its first step a resumed run leaves newer checkpoints where they are; they may be damaged.
        newest = (self._log.is_taken_up and self._newest_checkpoint()) or self._run.resume
        if unsaved is not None and not newest:
            raise unsaved
        self._log.display.message(f"{told}; {f'resume from {newest}' if newest else 'there is no checkpoint yet'}")
        if self._stop.reason == DEADLINE and not (newest and self._last_metrics):
            why = "no training step was complete" if not self._last_metrics else "no checkpoint could be saved"
            raise ConfigError(
                f"save_before={self.config.save_before!r} was over {seconds_since_start():.0f} s after the start of "
                f"this process, and {why} until then, so that the same command would end like this again and again; "
                "set a larger save_before, and give the job more time (timing/step says what a step takes)"
            ) from failure
        self._stop.has_checkpoint = bool(newest)
        raise KeyboardInterrupt from failure

    # ------------------------------------------------------------------------------------------------------ restarts

    def _attempts(self) -> Iterator[Attempt]:
        """Yield blocks for the work of a `fit()`: one, and another from the last checkpoint whenever ranks were lost in
        the one before, as often as max_restarts says."""
        self._fit_begun = self.global_step
        while True:
            attempt = Attempt(self._admitted)
            yield attempt
            if attempt.loss is None:
                return
            loss: Loss | None = attempt.loss
            while loss is not None:
                with Attempt(partial(self._admitted, earlier=loss)) as start:
                    self._restart(loss, self._restarts.delay_seconds)
                loss = start.loss

    def _make_again(self) -> None:
        """Make the workers again if a restart was broken off, by Ctrl-C for example. Does nothing otherwise."""
        if self._lost is None:
            return
        self._require_own()
        with self._stoppable(), self._working("fit()"):
            self._restart(self._lost, 0.0)

    def _admitted(self, error: Exception, earlier: Loss | None = None) -> Loss:
        """Return the loss after which work goes on, or raise. earlier: the loss after which a restart was under way."""
        if self._stop.reason:
            raise error
        step = self.global_step if earlier is None else earlier.step
        return self._restarts.admit(error, step, at_start=earlier is not None)

    def _restart(self, loss: Loss, delay_seconds: float) -> None:
        """Make the workers again from the last checkpoint, or as at the start of the run if there is none."""
        self._lost = loss
        self._workers.close()  # it waits for a checkpoint that is being written, if there are ranks to write it
        gc.collect()
        checkpoint = self._restart_point(loss)
        where = f"from {checkpoint}" if checkpoint is not None else "from the beginning, as there is no checkpoint yet"
        logger.warning(
            "after training step %d: %s. Restart %d of at most %d in %.0f s, %s",
            *(loss.step, loss.cause, self._restarts.number, self.config.max_restarts, delay_seconds, where),
        )
        wait(delay_seconds, self._stop)
        step = 0 if checkpoint is None else read_state(checkpoint, ("global_step",))["global_step"]
        self._log.resume(checkpoint, step)
        self._save_due, self._is_unevaluated, self._owed = False, False, None
        self._run = dataclasses.replace(self._run, resume=checkpoint)
        self._begin(self._run)
        # A callback that has stopped the run after an earlier step will do so again.
        self._is_stopping = self._ends_early or (self._is_stopping and self.global_step >= loss.step)
        self._lost = None
        self._log.display.start(self.global_step, goes_on=True)

    def _restart_point(self, loss: Loss) -> Path | None:
        """Return the checkpoint from which to go on; None for the beginning. Raises HybridRLError if that is gone, and
        CheckpointError for a damaged one."""
        # Until the first step is logged the checkpoints of a resumed folder may belong to another branch.
        found = newest_checkpoint(self.run_folder, is_ours=True) if self._log.is_taken_up else None
        if found is not None:
            found = check_resumed(found, is_auto=True)
        found = found or self._run.resume
        if found is None and steps_of(self.module) != self._begun_at[1]:
            raise HybridRLError(
                f"after training step {loss.step}: {loss.cause}. There is no checkpoint yet, and the module that was "
                "passed has been trained in place, so that its first weights are gone and no restart can begin with "
                "them: load it again, and set a smaller save_steps; a model that is passed by name or folder can be "
                f"loaded again\n{loss.traceback}"
            )
        return found


class Attempt(contextlib.AbstractContextManager["Attempt"]):
    """A block of work that may be broken off by a loss. A block, not a call, so that a debugger in the work shows no
    frames of restarts. admit: makes a loss of an error, or raises.

    loss: which broke the block off; without the error, whose frames would keep the lost workers in memory."""

    def __init__(self, admit: Callable[[Exception], Loss]) -> None:
        self._admit = admit
        self.loss: Loss | None = None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        try:
            self.loss = self._admit(error)
        except BaseException as raised:
            if raised is error:
                return False
            raise
        return True


def stop_of(config: TrainerConfig) -> Stop:
    """Return what may stop a run with this configuration."""
    listens = config.enable_jit_checkpoint or (is_own_process() and config.save_steps is not None)
    if config.save_before is None:
        return Stop(handles_signals=listens)
    return Stop(handles_signals=listens, seconds=seconds_of(config.save_before) - seconds_since_start())


def wait(seconds: float, stop: Stop) -> None:
    """Wait, unless a stop is requested. Raises KeyboardInterrupt then."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        stop.check()
        time.sleep(min(left, 0.2))
