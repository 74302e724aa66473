"""What a run is told of its agents, as it travels to the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AgentSetup:
    """The Trainer's arguments of these names; at most one of tools with environment_factory, rollout_func and agent.
    It is pickled by value (cloudpickle) to reach ranks in other processes, as reward functions are."""

    tools: tuple[Any, ...] = ()
    environment_factory: Any = None
    rollout_func: Any = None
    agent: Any = None

    @property
    def gives_rewards(self) -> bool:
        """Whether trajectories may get rewards while they are made."""
        return self.rollout_func is not None or self.agent is not None
