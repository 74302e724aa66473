"""Base class of workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.memory.comparison import Comparison, DevicePeak, Expected
from hybrid_rl.memory.cycle import Phase
from hybrid_rl.memory.history import History, Span, StepMemory
from hybrid_rl.memory.leases import Leases, Resident
from hybrid_rl.memory.probe import measure
from hybrid_rl.workers.preflight import RankProbe, probe_rank


class WorkerBase:
    """A rank of a worker group: its leases and its measured memory. expected: what the plan of the run says of it, None
    if there is no plan."""

    def __init__(self, context: RankContext, expected: Expected | None = None) -> None:
        self._context = context
        # An engine's memory comes from the device itself: PyTorch must not keep memory that an update has freed.
        give_back = torch.cuda.empty_cache if context.device.type == "cuda" else None
        self.leases = Leases(gather=context.gather if context.num_ranks > 1 else None, give_back=give_back)
        self.movable: set[str] = set()  # tags of the residents that can sleep
        self.history = History()
        self._comparison: Comparison | None = None
        if expected is not None:
            peak = DevicePeak(context.device) if context.device.type == "cuda" else None
            self._comparison = Comparison(expected, self.leases.resident_bytes, peak)
        self._seconds = {"sleep": 0.0, "wake": 0.0}  # since the last step

    def hold(self, resident: Resident) -> None:
        """Register what is in this rank's memory. If it can sleep, it does so now."""
        self.leases.add(resident)
        if resident.wake is not None:
            self.movable.add(resident.tag)

    def arena_bytes(self) -> int | None:
        """Return bytes of host memory in which residents of this rank wait, or will again; None if none ever does."""
        return None

    @contextmanager
    def lease(self, tags: frozenset[str]) -> Iterator[None]:
        """Have these residents in memory inside the block."""
        lease = self.leases.lease(tags)
        try:
            with lease:
                self._note_moves()
                yield
        finally:
            lease.end()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Have what a phase needs in memory inside the block, and watch it."""
        with self.lease(phase.tags), self.watched(phase):
            yield

    @contextmanager
    def watched(self, phase: Phase) -> Iterator[None]:
        """Note when this phase was, and compare its memory with the plan."""
        self.history.start(self.leases.resident_bytes)
        comparison = self._comparison
        if comparison is None:
            with self.history.phase(phase.name):
                yield
        else:
            with self.history.phase(phase.name, lambda: comparison.last_peak), comparison.phase(phase.name):
                yield

    def _note_moves(self) -> None:
        """Add what has moved to the history of the step."""
        moved = self.leases.drain_transitions()
        for transition in moved:
            self._seconds["wake" if transition.awake else "sleep"] += transition.seconds
        self.history.note(moved)

    @dispatch(collect="all")
    def memory_metrics(self) -> dict[str, float]:
        """Return bytes by resident (0 = asleep), of the arena, and as measured for the process, seconds of the sleeps
        and wakes since the last call, and how far the memory was from its plan. It ends a step of the history."""
        sizes = self.leases.resident_bytes()
        all_sizes = {**sizes, **measure()}
        if (arena_bytes := self.arena_bytes()) is not None:
            all_sizes["arena"] = arena_bytes
        metrics = {f"memory/{tag}_bytes": float(size) for tag, size in all_sizes.items()}
        self._note_moves()
        self.history.end_step(sizes)
        for verb, seconds in self._seconds.items():
            metrics[f"timing/{verb}"] = seconds
            self._seconds[verb] = 0.0
        return metrics if self._comparison is None else metrics | self._comparison.drain()

    @dispatch(collect="all")
    def memory_history(self) -> list[StepMemory]:
        """Return what was in memory over the last steps, oldest first."""
        return self.history.steps

    @dispatch(collect="all")
    def last_phases(self) -> list[Span]:
        """Return the phases of the last step of the history, by their end."""
        steps = self.history.steps
        return list(steps[-1].phases) if steps else []

    @dispatch(collect="all")
    def probe_rank(self) -> RankProbe:
        """Measure versions and speed of this rank, for `preflight`."""
        return probe_rank(self._context)

    def close(self) -> None:
        """Release all resources of the worker; subclasses extend."""
