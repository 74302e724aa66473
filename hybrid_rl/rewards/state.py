"""The state of the run that reward functions get. No torch here: reward processes load this class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run.

    global_step: the training step under way (from 1; in an evaluation the steps done). max_steps: the planned last one.
    epoch: passes over the training data done.
    """

    global_step: int
    max_steps: int
    epoch: float
