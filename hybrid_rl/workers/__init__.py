"""Workers: what runs on a rank."""

from hybrid_rl.workers.groups import PolicyGroup, RankGroup, ReferenceGroup
from hybrid_rl.workers.hybrid import HybridWorker
from hybrid_rl.workers.reference import ReferenceWorker
from hybrid_rl.workers.setup import RewardSetup, WorkerSetup

__all__ = [
    "HybridWorker",
    "PolicyGroup",
    "RankGroup",
    "ReferenceGroup",
    "ReferenceWorker",
    "RewardSetup",
    "WorkerSetup",
]
