"""Training steps of a rank that trains beside one that only generates, both in this process; either can be measured:
what the other one holds does not count, nor do pages of files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import Tensor

from hybrid_rl.controller import LocalBackend
from hybrid_rl.memory.cycle import ACTOR, KV_CACHE, Phase
from hybrid_rl.resharding.handoff.disk import DiskSource
from hybrid_rl.workers.apart import RolloutGroup, RolloutWorker, rollout_setup
from hybrid_rl.workers.hybrid import HybridWorker
from tests.support.inside.engines import cache_pairs
from tests.support.inside.memory import opened_by, slot_tensors, watch_sources
from tests.support.inside.workers import (
    actor_of,
    arena_of,
    engine_of,
    generating_model_of,
    module_of,
    optimizer_of,
    step_in_calling_thread,
)
from tests.support.memory.measured_memory import Measured, MeasuredMemory
from tests.support.memory.memory_cases import ARENA, GRADIENTS, OF_OTHERS, MeasuredStep, gradients, shards


class MeasuredApart(MeasuredStep):
    """Weights go through files in this folder."""

    def run_side(self, root: Path, *, trains: bool) -> dict[str, Measured]:
        """Two training steps; what the second took of the rank that trains, or of the one that generates."""
        trained, made = replace(self._setup, generates=False), rollout_setup(self._setup)
        generating = RolloutGroup(
            LocalBackend("rollout", lambda context: self._keep_rollout(made, context)),
            LocalBackend("policy", lambda context: self._keep(HybridWorker(trained, context))),
            has_scores=True,
            root=root,
        )
        try:
            step_in_calling_thread(self.engine)
            sides = (self._of_training, self._of_generating)
            own, other = sides if trains else sides[::-1]

            def residents() -> dict[str, list[Tensor]]:
                others = [tensor for tensors in other().values() for tensor in tensors]
                return own() | {OF_OTHERS: [*others, *self._mapped()]}

            self._sources = WeakSet[DiskSource]()
            with (
                self._sources_seen(),
                MeasuredMemory(residents, on_host=(ARENA, OF_OTHERS), lasting=(GRADIENTS,) if trains else ()) as memory,
            ):
                self._watch(memory) if trains else self._watch_generating(memory)
                for step in (0, 1, 2):
                    memory.forget()
                    if step:
                        self._train(generating, generating.policy, step)
                    generating.update_weights(step)
                return memory.phases
        finally:
            generating.policy.close()

    def _keep(self, worker: HybridWorker) -> HybridWorker:
        self.worker = worker
        return worker

    def _keep_rollout(self, setup: Any, context: Any) -> RolloutWorker:
        self.engine = RolloutWorker(setup, context)
        return self.engine

    def _of_training(self) -> dict[str, list[Tensor]]:
        worker, found = self.worker, {}
        found[ACTOR] = shards(module_of(worker))
        found["optimizer"] = optimizer_of(worker).tensors()
        found[ARENA] = slot_tensors(arena_of(worker))
        found[GRADIENTS] = gradients(actor_of(worker))
        return found

    def _of_generating(self) -> dict[str, list[Tensor]]:
        engine: Any = engine_of(self.engine)
        cache = [tensor for pair in cache_pairs(engine) for tensor in pair]
        return {ACTOR: shards(generating_model_of(self.engine).module), KV_CACHE: cache}

    def _mapped(self) -> list[Tensor]:
        """Tensors of the version that is read: pages of its files, of which no rank has a copy."""
        opened = [parts for source in list(self._sources) for parts in opened_by(source)]
        return [tensor for parts in opened for tensor in parts if tensor is not None]

    @contextmanager
    def _sources_seen(self) -> Iterator[None]:
        with watch_sources(self._sources.add):
            yield

    def _watch_generating(self, memory: MeasuredMemory) -> None:
        watched = self.engine.watched

        @contextmanager
        def measured(phase: Phase) -> Iterator[None]:
            with watched(phase), memory.phase(phase.name):
                yield

        self.engine.watched = measured  # type: ignore[method-assign]
