"""Workers: what runs on a rank."""

from hybrid_rl.workers.hybrid import HybridWorker, WorkerSetup

__all__ = ["HybridWorker", "WorkerSetup"]
