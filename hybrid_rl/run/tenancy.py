"""Trainers in one process: resources that only one may hold, shared modules, and what a closed or busy one refuses."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.rank_keys import RayControllerConfig
from hybrid_rl.errors import ConfigError, EngineStateError, HybridRLError, counted
from hybrid_rl.memory.cycle import ACTOR
from hybrid_rl.process.interrupts import show_shortly
from hybrid_rl.run.guard import StepGuard
from hybrid_rl.run.position import Position
from hybrid_rl.run.restarts import Loss

logger = logging.getLogger("hybrid_rl")

_open: weakref.WeakSet[Tenancy] = weakref.WeakSet()
# Objects that a fork copied into this process are kept alive here: dropping them would make Ray notify the parent's
# cluster through the parent's own connection, which breaks it.
_inherited: list[Tenancy] = []
_steps: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_trained_by: weakref.WeakKeyDictionary[nn.Module, Path] = weakref.WeakKeyDictionary()  # run folder of the last trainer


class Tenancy:
    """A Trainer's place among others of its process: it can be closed by its user or for another, and one thing is done
    with it at a time.

    config: of the start. module: the user's own if it is trained in place, else None. publish_again: gives the engine
    the weights of the module once more.

    closed: the reason, once it is closed. lost: after which the ranks have ended; None once they are there again.
    work: calls in progress: fit(), inside it step(), inside that evaluate().
    """

    def __init__(
        self,
        config: TrainerConfig,
        module: nn.Module | None,
        run_folder: Path,
        guard: StepGuard,
        position: Position,
        publish_again: Callable[[], None],
    ) -> None:
        self.config, self.module, self.run_folder = config, module, run_folder
        self._guard, self._position, self._publish_again = guard, position, publish_again
        self._pid = os.getpid()
        self._closing = contextlib.ExitStack()
        self._is_computing = False  # outside of a training step, for evaluate() or generate()
        self._module_steps = steps_of(module)
        self.closed = ""
        self.lost: Loss | None = None
        self.work: Sequence[str] = ()

    def enter(self, closing: contextlib.ExitStack) -> None:
        """Let others of the process see it. closing: what `close` releases."""
        self._closing, self._module_steps = closing, steps_of(self.module)
        _open.add(self)

    def close(self, reason: str = "") -> None:
        """Release all that the Trainer holds; a second call does nothing. reason: shown by later calls.

        Raises HybridRLError while the Trainer is working.
        """
        if self.work and self.is_own:
            raise HybridRLError(
                f"close() was called while {self.work[0]} runs: to end a run early call trainer.stop() in a callback, "
                "and close() after fit()"
            )
        is_first, self.closed = not self.closed, self.closed or (f": {reason}" if reason else ";")
        _open.discard(self)
        if self.is_own:
            self._closing.close()
        elif is_first:
            _inherited.append(self)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Refuse `close` inside the block."""
        self.work = [*self.work, what]
        try:
            yield
        except KeyboardInterrupt as interrupt:
            advice = "step() or fit() goes on" if not self._guard.is_torn else "make a new Trainer, with resume="
            if self.lost is not None:
                advice = "the ranks have ended, and fit() makes them again"
            at = f"training step {self._position.step} of {self._position.max_steps}"
            show_shortly(interrupt, f"interrupted after {at}; {advice}")
            raise
        finally:
            self.work = self.work[:-1]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Refuse whatever needs the workers inside the block."""
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False

    @property
    def is_own(self) -> bool:
        """Whether it belongs to this process, rather than to the one that this is a fork of."""
        return self._pid == os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether the workers compute something."""
        return self._guard.is_stepping or self._is_computing

    def require_own(self) -> None:
        """Raise HybridRLError for one that is closed, or of another process."""
        if not self.is_own:
            raise HybridRLError(
                f"this is process {os.getpid()}, a fork of process {self._pid}, to which the Trainer belongs: use it "
                "there, or make a new one here"
            )
        if self.closed:
            error = HybridRLError(f"this Trainer is closed{self.closed} make a new one")
            show_shortly(error, str(error))
            raise error

    def require_open(self) -> None:
        """Raise HybridRLError also for one without ranks, or with weights between two steps."""
        self.require_own()
        if self.lost is not None:
            raise HybridRLError(
                f"the ranks have ended after training step {self.lost.step} ({self.lost.cause}), and the restart was "
                "broken off: fit() makes them again and goes on from the last checkpoint"
            )
        if self._guard.is_torn:
            raise HybridRLError(
                f"the update after step {self._position.step} was interrupted: make a new Trainer, with resume="
            )

    def require_idle(self, what: str) -> None:
        """Require an open one whose workers are free: a reward function that called them would wait for itself."""
        self.require_open()
        if self.is_busy:
            busy = "a training step" if self._guard.is_stepping else "an evaluation or generation"
            raise EngineStateError(f"{busy} is running; {what} before or after it, or from a callback's on_step_end")

    def require_current(self) -> None:
        """If another Trainer has trained the module, publish its weights to the engine again."""
        if self.module is not None and self._module_steps != steps_of(self.module):
            logger.warning(
                "the Trainer of %s has trained the module of this one (%s) in the meantime, so the state of this one's "
                "optimizer belongs to older weights. close() this one and make another, which starts from the module "
                "as it is now; to train independently, give each a copy (copy.deepcopy) or a model by name",
                _trained_by[self.module],
                self.run_folder,
            )
            self._module_steps = steps_of(self.module)
            self._publish_again()

    def note_training(self) -> None:
        """Count one more training step of the module, of which other Trainers that have it are to be warned."""
        if self.module is not None:
            self._module_steps = _steps[self.module] = steps_of(self.module) + 1
            _trained_by[self.module] = self.run_folder


def has_folder(folder: Path) -> bool:
    """Whether an open Trainer of this process writes into this run folder."""
    return any(other.run_folder.resolve() == folder.resolve() for other in open_here())


def open_here() -> list[Tenancy]:
    """List the open Trainers of this process, without copies made by a fork."""
    return [other for other in _open if other.is_own]


def make_way(config: TrainerConfig, folder: Path | None) -> None:
    """Close the Trainers that hold what a new one needs exclusively: its run folder, the vLLM of the process.
    They are often left over: a notebook keeps the Trainer of a cell that is run again.

    Raises ConfigError while one of them is in a training step.
    """
    for other in open_here():
        resource = ""
        if folder is not None and other.run_folder.resolve() == folder.resolve():
            resource = f"the run folder {folder}"
        elif (engine := _colocated(config)) and engine == _colocated(other.config):
            resource = f"the {engine} engine, which can run only once in a process"
        if not resource:
            continue
        if other.work:
            raise ConfigError(
                f"a Trainer of this process has {resource}, and its {other.work[0]} is running; wait for it"
            )
        logger.warning(
            "closing the Trainer of %s because a new Trainer in this process needs %s", other.run_folder, resource
        )
        other.close(f"a later one of this process needed {resource};")


def bring_back(module: Any) -> None:
    """Close a Trainer that lets this module's weights leave memory, so that a new one finds them: what both need would
    come and go under them. Anything but such a module is left alone.

    Raises ConfigError while that Trainer is in a training step.
    """
    for other in open_here():
        if other.module is not module or module is None or ACTOR not in (other.config.memory.offload or ()):
            continue
        if other.work:
            raise ConfigError(
                f"a Trainer of this process moves this module to host memory and back (memory.offload names {ACTOR}), "
                f"and its {other.work[0]} is running; wait for it, or pass a copy.deepcopy made before"
            )
        logger.warning(
            "closing the Trainer of %s because a new Trainer is made of its module, which is in memory only when that "
            "Trainer needs it (memory.offload names %s)",
            *(other.run_folder, ACTOR),
        )
        other.close("a later one of this process was made of its module;")


def _colocated(config: TrainerConfig) -> str | None:
    """Return the colocated engine of this process, if there is one."""
    is_here = config.rollout.placement == "colocated" and not isinstance(config.controller, RayControllerConfig)
    return config.rollout.engine if is_here else None


def warn_of_training(module: nn.Module | None, *, is_resumed: bool) -> None:
    """Warn if a module to be trained in place is or was trained by another Trainer. None: no such module."""
    for other in open_here():
        if module is not None and other.module is module:
            logger.warning(
                "the Trainer of %s is open and trains the same module: each changes the weights under the other's "
                "optimizer; close() it, or pass a copy (copy.deepcopy) or a name",
                other.run_folder,
            )
    if steps_of(module) and not is_resumed:
        logger.warning(
            "the module was trained before, %s in this process: training continues from its present weights; load it "
            "again to start over",
            counted(steps_of(module), "step"),
        )


def steps_of(module: nn.Module | None) -> int:
    """Count the training steps of a module in this process, by any Trainer."""
    return 0 if module is None else _steps.get(module, 0)
