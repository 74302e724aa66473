"""Agents: policies that act over many turns, with tools and environments."""

from __future__ import annotations

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.trajectory import Trajectory

__all__ = ["Trajectory", "TrajectoryEndedError"]
