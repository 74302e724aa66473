"""Base class of workers."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.memory.leases import Leases, Resident
from hybrid_rl.memory.probe import measure
from hybrid_rl.workers.preflight import RankProbe, probe_rank


class WorkerBase:
    """A rank of a worker group: its leases and its measured memory."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        # An engine's memory comes from the device itself: PyTorch must not keep memory that an update has freed.
        give_back = torch.cuda.empty_cache if context.device.type == "cuda" else None
        self.leases = Leases(gather=context.gather if context.num_ranks > 1 else None, give_back=give_back)
        self.movable: set[str] = set()  # tags of the residents that can sleep

    def hold(self, resident: Resident) -> None:
        """Register what is in this rank's memory. If it can sleep, it does so now."""
        self.leases.add(resident)
        if resident.wake is not None:
            self.movable.add(resident.tag)

    def lease(self, tags: frozenset[str]) -> AbstractContextManager[None]:
        """Have these residents in memory inside the block."""
        return self.leases.lease(tags)

    @dispatch(collect="all")
    def memory_metrics(self) -> dict[str, float]:
        """Return bytes by resident (0 = asleep), as measured for the process, and seconds of the sleeps and wakes since
        the last call."""
        metrics = {f"memory/{tag}_bytes": float(size) for tag, size in self.leases.resident_bytes().items()}
        metrics.update({f"memory/{name}_bytes": float(size) for name, size in measure().items()})
        moved = self.leases.drain_transitions()
        metrics["timing/sleep"] = sum(t.seconds for t in moved if not t.awake)
        metrics["timing/wake"] = sum(t.seconds for t in moved if t.awake)
        return metrics

    @dispatch(collect="all")
    def probe_rank(self) -> RankProbe:
        """Measure versions and speed of this rank, for `preflight`."""
        return probe_rank(self._context)

    def close(self) -> None:
        """Release all resources of the worker; subclasses extend."""
