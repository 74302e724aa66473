"""Restarts of a run's workers: which errors allow one, how many there were, and how long to wait before the next."""

from __future__ import annotations

import textwrap
import traceback
from dataclasses import dataclass

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.algorithm import has_reference_model
from hybrid_rl.controller.failures import is_of_ranks, summary_of
from hybrid_rl.errors import (
    AgentError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    ModelError,
    NoRoomError,
    RewardError,
    StorageError,
    WorkerError,
)

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 5.0, 300.0
# They say what the user gave or what was learned, and would come again.
LASTING = (ConfigError, DataError, ModelError, RewardError, AgentError, DivergedError, CheckpointError, StorageError)
CAUSE_LENGTH = 240


def check_restarts(config: TrainerConfig, *, is_in_place: bool) -> None:
    """Raise ConfigError if what a restart needs is overwritten by training. is_in_place: whether a module is trained
    that the user passed."""
    if config.max_restarts and is_in_place and has_reference_model(config):
        raise ConfigError(
            f"max_restarts={config.max_restarts}: the reference model is a copy of the module that you pass, which is "
            "trained in place, so that a restart could not make it again; pass the model by its name or folder"
        )


@dataclass(frozen=True)
class Loss:
    """A failure after which the workers are made again. step: after which training step it came, cause: in a line;
    traceback: text, since the error itself would keep the memory of its frames."""

    step: int
    cause: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, step: int) -> Loss:
        """Describe an error after a training step."""
        said = summary_of(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        cause = textwrap.shorten(said.split("\n")[0], CAUSE_LENGTH, placeholder=" ...")
        return cls(step, cause, "".join(traceback.format_exception(error)).rstrip())


class Restarts:
    """Counts the restarts of a Trainer. limit: max_restarts.

    number: of restarts so far.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.number = 0
        self._last: Loss | None = None  # in training, not at a start
        self._best_step = -1
        self._num_in_row = 0

    def admit(self, error: Exception, step: int, *, at_start: bool = False) -> Loss:
        """Count a restart after this error, which came after so many complete training steps, and return what is known
        of it. at_start: it broke off a restart, so training has not got that far again.

        Raises the error if it allows no restart or there were enough, and WorkerError with both tracebacks if
        training failed after the same step as the last time.
        """
        waits_for_disk = at_start and isinstance(error, StorageError)  # full for a while
        if not self._limit or not (may_restart(error) or waits_for_disk):
            raise error
        loss, last = Loss.of(error, step), self._last
        if not at_start and last is not None and last.step == step:
            raise WorkerError(
                f"training failed a second time after step {step}, so another restart would not help.\n"
                f"The first time, before restart {self.number} of {self._limit}: {last.cause}\n"
                f"{textwrap.indent(last.traceback, '    ')}\n"
                f"The second time: {loss.cause}\n{textwrap.indent(loss.traceback, '    ')}"
            ) from error
        if self.number >= self._limit:
            before = f"; the failure before came after step {last.step}: {last.cause}" if last is not None else ""
            error.add_note(f"there were {self.number} restarts, and max_restarts={self._limit}{before}")
            raise error
        self.number += 1
        if not at_start:
            self._num_in_row = self._num_in_row if step <= self._best_step else 0
            self._last, self._best_step = loss, max(step, self._best_step)
        self._num_in_row += 1
        return loss

    @property
    def delay_seconds(self) -> float:
        """How long to wait before this restart: twice as long as before the last one, unless training got further in
        between."""
        return min(FIRST_DELAY_SECONDS * 2.0 ** (self._num_in_row - 1), LONGEST_DELAY_SECONDS)


def may_restart(error: BaseException) -> bool:
    """Whether an error came from the ranks or their machines, rather than from the user's functions or data."""
    if isinstance(error, NoRoomError):
        return True
    return isinstance(error, Exception) and not isinstance(error, LASTING) and is_of_ranks(error)
