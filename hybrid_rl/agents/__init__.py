"""Agents: policies that act over many turns, with tools and environments."""

from __future__ import annotations

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.environments import EnvironmentLostError, repeatable
from hybrid_rl.agents.trajectory import Trajectory

__all__ = ["EnvironmentLostError", "Trajectory", "TrajectoryEndedError", "repeatable"]
