"""Episodes: one attempt of an agent at one row, and the form that all kinds of agents take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_rl.agents.client import AgentClient
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.data.prompts import Prompt


@dataclass(frozen=True)
class Episode:
    """row: the columns of the dataset row without the prompt; prompt: text or messages, None if the environment makes
    it. Tokens, turns and counts collect in `trajectory`. trainer_state: progress of the run, as reward functions get
    it.
    """

    prompt: Prompt | None
    row: Mapping[str, Any]
    client: AgentClient
    trajectory: Trajectory
    trainer_state: Any = None


# Runs one episode to its end. What it raises ends the trajectory with reason "error", except TrajectoryEndedError, and
# except AgentError, which ends the run. If it has a method `close()`, that is called once, after the last episode of
# the run; `sample_at(temperature)` of an agent that must know it is called, between episodes, if it changes.
Agent = Callable[[Episode], Awaitable[None]]
