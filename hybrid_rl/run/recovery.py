"""Runs that last: workers that are lost are made again, from the last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from hybrid_rl.checkpoint.finding import check_resumed, newest_checkpoint
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.errors import HybridRLError
from hybrid_rl.process.stopping import Stop
from hybrid_rl.run.crew import Crew
from hybrid_rl.run.restarts import Loss, Restarts
from hybrid_rl.run.saver import Saver
from hybrid_rl.run.settings import Settings
from hybrid_rl.run.stopper import Stopper
from hybrid_rl.run.tenancy import Tenancy, steps_of

logger = logging.getLogger("hybrid_rl")


class Recovery:
    """Makes the workers of a run again when ranks are lost, as often as max_restarts says; with smaller micro-batches
    if one of them ran out of memory.

    log: of the run, which goes back with it. saver: waits for its checkpoint before the workers end.
    """

    def __init__(self, crew: Crew, tenancy: Tenancy, saver: Saver, stopper: Stopper, settings: Settings) -> None:
        self._crew, self._position, self._log = crew, crew.position, crew.log
        self._tenancy, self._stopper, self._saver, self._settings = tenancy, stopper, saver, settings
        self._restarts = Restarts(crew.config.max_restarts)
        self._first_steps = steps_of(crew.run.module)  # training steps of the module at the start

    def metrics(self) -> dict[str, float]:
        """Return the number of restarts so far, of a run that may have any."""
        return {"restarts": float(self._restarts.number)} if self._crew.config.max_restarts else {}

    def attempts(self) -> Iterator[Attempt]:
        """Yield blocks for the work of a `fit()`: one, and another from the last checkpoint whenever ranks were lost in
        the one before, as often as max_restarts says."""
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

    def make_again(self) -> None:
        """Make the workers again if a restart was broken off, by Ctrl-C for example. Does nothing otherwise."""
        loss = self._tenancy.lost
        if loss is None:
            return
        self._tenancy.require_own()
        with self._stopper.listening(), self._tenancy.working("fit()"):
            self._restart(loss, 0.0)

    def _admitted(self, error: Exception, earlier: Loss | None = None) -> Loss:
        """Return the loss after which work goes on, or raise. earlier: the loss after which a restart was under way."""
        if self._stopper.stop.reason:
            raise error
        step = self._position.step if earlier is None else earlier.step
        tokens = self._settings.smaller_micro_batch(error)
        loss = self._restarts.admit(error, step, at_start=earlier is not None, is_eased=tokens is not None)
        if tokens is not None:
            self._settings.shrink(tokens)
        return loss

    def _restart(self, loss: Loss, delay_seconds: float) -> None:
        """Make the workers again from the last checkpoint, or as at the start of the run if there is none."""
        self._tenancy.lost = loss
        self._crew.end()  # it waits for a checkpoint that is being written, if there are ranks to write it
        gc.collect()
        checkpoint = self._restart_point(loss)
        where = f"from {checkpoint}" if checkpoint is not None else "from the beginning, as there is no checkpoint yet"
        logger.warning(
            "after training step %d: %s. Restart %d of at most %d in %.0f s, %s",
            *(loss.step, loss.cause, self._restarts.number, self._crew.config.max_restarts, delay_seconds, where),
        )
        wait(delay_seconds, self._stopper.stop)
        self._log.resume(checkpoint)
        self._position.save_due, self._position.is_unevaluated, self._position.owed = False, False, None
        self._crew.run = dataclasses.replace(self._crew.run, checkpoint=checkpoint)
        self._crew.start(self._saver.finish)
        # A callback that has stopped the run after an earlier step will do so again.
        stopper = self._stopper
        stopper.is_asked = stopper.ends_early or (stopper.is_asked and self._position.step >= loss.step)
        self._tenancy.lost = None
        self._log.display.start(self._position.step, goes_on=True)

    def _restart_point(self, loss: Loss) -> Checkpoint | None:
        """Return the checkpoint from which to go on; None for the beginning. Raises HybridRLError if that is gone, and
        CheckpointError for a damaged one."""
        # Until the first step is logged the checkpoints of a resumed folder may belong to another branch.
        newest = newest_checkpoint(self._crew.folder, is_ours=True) if self._log.is_taken_up else None
        checkpoint = self._crew.run.checkpoint if newest is None else check_resumed(newest, is_auto=True)
        if checkpoint is None and steps_of(self._crew.run.module) != self._first_steps:
            raise HybridRLError(
                f"after training step {loss.step}: {loss.cause}. There is no checkpoint yet, and the module that was "
                "passed has been trained in place, so that its first weights are gone and no restart can begin with "
                "them: load it again, and set a smaller save_steps; a model that is passed by name or folder can be "
                f"loaded again\n{loss.traceback}"
            )
        return checkpoint


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


def wait(seconds: float, stop: Stop) -> None:
    """Wait, unless a stop is requested. Raises KeyboardInterrupt then."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        stop.check()
        time.sleep(min(left, 0.2))
