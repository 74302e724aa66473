"""The parts of a Trainer that users have no name for: tests break them, or look at what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.inside.wrapping import Wrapper, wrap

if TYPE_CHECKING:  # whoever has a Trainer has imported all of it
    import pytest

    from hybrid_rl import Trainer
    from hybrid_rl.logging.run_log import RunLog
    from hybrid_rl.run.best import BestStep
    from hybrid_rl.run.crew import Crew
    from hybrid_rl.run.evaluator import RunEvaluator
    from hybrid_rl.run.position import Position
    from hybrid_rl.run.saver import Saver
    from hybrid_rl.run.stopper import Stopper


def position_of(trainer: Trainer) -> Position:
    return trainer._position


def crew_of(trainer: Trainer) -> Crew:
    return trainer._crew


def best_of(trainer: Trainer) -> BestStep:
    return trainer._crew.best


def saver_of(trainer: Trainer) -> Saver:
    return trainer._saver


def stopper_of(trainer: Trainer) -> Stopper:
    return trainer._stopper


def evaluator_of(trainer: Trainer) -> RunEvaluator:
    return trainer._evaluator


def log_of(trainer: Trainer) -> RunLog:
    return trainer._log


def prefers_larger(best: BestStep) -> bool:
    """Whether an evaluation is better if its number is larger."""
    return best._sign > 0


def set_saving(saver: Saver, folder: Path) -> None:
    """As if a checkpoint were being written in the background."""
    saver._saving = folder


def is_saving(saver: Saver) -> bool:
    """Whether a checkpoint is being written in the background."""
    return saver._saving is not None


def wrap_keep_aside(patch: pytest.MonkeyPatch, wrapper: Wrapper) -> None:
    """Have `wrapper(keep_aside, folder, path, dropped)` called where lines of a file are put aside."""
    from hybrid_rl.logging.run_folder import RunFolder

    wrap(patch, RunFolder, "_keep_aside", wrapper)
