"""Restarts of a run's workers: which errors allow one, how many there were, and how long to wait before the next."""

from __future__ import annotations

import errno
import re
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
CAUSE_LENGTH = 400
# A process that needs more memory than there is is killed at every try; one or two kills may have been somebody's.
MAX_KILLS = 3
# Numbers of an error that may differ between two that are the same: ids of processes, bytes, addresses.
NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}


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
    traceback: text, since the error itself would keep the memory of its frames. is_kill: processes are gone, and none
    said why. kind: the same for errors that are the same but for their numbers."""

    step: int
    cause: str
    traceback: str
    is_kill: bool = False
    kind: str = ""

    @classmethod
    def of(cls, error: BaseException, step: int) -> Loss:
        """Describe an error after a training step."""
        said = summary_of(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        cause = textwrap.shorten(said.split("\n")[0], CAUSE_LENGTH, placeholder=" ...")
        is_kill = isinstance(error, WorkerError) and error.is_kill
        first, _, _ = str(error).split("\n")[0].partition(". ")
        kind = f"{type(error.__cause__ or error).__name__}: {NUMBERS.sub('#', first)}"
        return cls(step, cause, "".join(traceback.format_exception(error)).rstrip(), is_kill, kind)


class Restarts:
    """Counts the restarts of a Trainer. limit: max_restarts.

    number: of restarts so far.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.number = 0
        self._losses: list[Loss] = []  # the last ones in training, all after the same step
        self._best_step = -1
        self._num_in_row = 0

    def admit(self, error: Exception, step: int, *, at_start: bool = False, is_eased: bool = False) -> Loss:
        """Count a restart after this error, which came after so many complete training steps, and return what is known
        of it. at_start: it broke off a restart, so training has not got that far again. is_eased: the next try takes
        less memory, so that the same error after the same step says nothing about it.

        Raises the error if it allows no restart or there were enough, and WorkerError with the tracebacks if training
        failed after the same step in the same way as before, or lost processes there for the third time in a row.
        """
        if not self._limit or not may_restart(error, at_start=at_start):
            raise error
        loss = Loss.of(error, step)
        before = [earlier_loss for earlier_loss in self._losses if earlier_loss.step == step]
        if not at_start and not is_eased and (same := _same(loss, before)):
            raise _again([*same, loss], self.number) from error
        if self.number >= self._limit:
            failure = self._losses[-1] if self._losses else None
            last = (
                f"; the failure before came after step {failure.step}: {failure.cause}" if failure is not None else ""
            )
            error.add_note(f"there were {self.number} restarts, and max_restarts={self._limit}{last}")
            raise error
        self.number += 1
        if not at_start:
            self._num_in_row = self._num_in_row if step <= self._best_step else 0
            self._losses, self._best_step = [*before, loss], max(step, self._best_step)
        self._num_in_row += 1
        return loss

    @property
    def delay_seconds(self) -> float:
        """How long to wait before this restart: twice as long as before the last one, unless training got further in
        between."""
        return min(FIRST_DELAY_SECONDS * 2.0 ** (self._num_in_row - 1), LONGEST_DELAY_SECONDS)


def _same(loss: Loss, before: list[Loss]) -> list[Loss]:
    """Return the earlier losses after the same step that show, with this one, that another restart would not help."""
    if not loss.is_kill:
        return [earlier_loss for earlier_loss in before if earlier_loss.kind == loss.kind][-1:]
    last = before[1 - MAX_KILLS :]
    return last if len(last) == MAX_KILLS - 1 and all(earlier_loss.is_kill for earlier_loss in last) else []


def _again(failures: list[Loss], num_restarts: int) -> WorkerError:
    """Return the error for failures after the same step that show that another restart would not help."""
    step, number = failures[-1].step, len(failures)
    if failures[-1].is_kill:
        lines = [
            f"processes were killed {number} times in a row after step {step}, so another restart would not help; if "
            "memory ran out (dmesg says so), make the step smaller, or use more ranks."
        ]
    else:
        lines = [f"training failed with the same error again after step {step}, so another restart would not help."]
    lines[0] += f" Restarts so far: {num_restarts}."
    for place, failure in enumerate(failures, 1):
        lines += [f"Failure {place} of {number}: {failure.cause}", textwrap.indent(failure.traceback, "    ")]
    return WorkerError("\n".join(lines))


def may_restart(error: BaseException, *, at_start: bool = False) -> bool:
    """Whether an error came from the ranks or their machines, rather than from the user's functions or data. at_start:
    it broke off a restart, so that a disk that cannot be written to ended no training yet, and may be free again."""
    if isinstance(error, NoRoomError):
        return True
    if at_start and (isinstance(error, StorageError) or (isinstance(error, OSError) and error.errno in DISK)):
        return True
    return isinstance(error, Exception) and not isinstance(error, LASTING) and is_of_ranks(error)
