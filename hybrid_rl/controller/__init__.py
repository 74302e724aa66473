"""Calls, ranks and batches. Knows nothing of reinforcement learning."""

from hybrid_rl.controller.dispatch import dispatch
from hybrid_rl.controller.group import Backend, WorkerGroup, result_of
from hybrid_rl.controller.local import LocalBackend
from hybrid_rl.controller.mesh import RankMesh
from hybrid_rl.controller.ranks import RankContext, child_environment, enter_device

__all__ = [
    "Backend",
    "LocalBackend",
    "RankContext",
    "RankMesh",
    "WorkerGroup",
    "child_environment",
    "dispatch",
    "enter_device",
    "result_of",
]
