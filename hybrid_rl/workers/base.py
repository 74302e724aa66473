"""What every worker has."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hybrid_rl.controller import dispatch
from hybrid_rl.memory import Leases, measure


class WorkerBase:
    """A rank of a worker group: its leases and its measured memory."""

    def __init__(self) -> None:
        self.leases = Leases()

    def lease(self, tags: frozenset[str]) -> AbstractContextManager[None]:
        """Have these residents in memory inside the block."""
        return self.leases.lease(tags)

    @dispatch(collect="leader")
    def memory_metrics(self) -> dict[str, float]:
        """Bytes by resident (0 = asleep), as measured for the process, and seconds of the sleeps and wakes since the
        last call."""
        metrics = {f"memory/{tag}_bytes": float(size) for tag, size in self.leases.resident_bytes().items()}
        metrics.update({f"memory/{name}_bytes": float(size) for name, size in measure().items()})
        moved = self.leases.drain_transitions()
        metrics["timing/sleep"] = sum(t.seconds for t in moved if not t.awake)
        metrics["timing/wake"] = sum(t.seconds for t in moved if t.awake)
        return metrics

    def close(self) -> None:
        """Release what the worker holds; subclasses extend."""
