"""Calls, ranks and batches. Knows nothing of reinforcement learning."""

from hybrid_rl.controller.dispatch import AXES, Dispatch, dispatch
from hybrid_rl.controller.group import Backend, WorkerGroup
from hybrid_rl.controller.local import LocalBackend

__all__ = ["AXES", "Backend", "Dispatch", "LocalBackend", "WorkerGroup", "dispatch"]
