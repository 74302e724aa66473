"""A hundred cycles leave memory as it was: every resident to the byte, and what the process holds in all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from hybrid_rl.memory.cycle import Cycle
from tests.support.engines.sleeping_engine import sleeping_engine
from tests.support.inside.workers import arena_of, cycle_of, side_of, worker_of
from tests.support.memory.memory_runs import folders
from tests.support.memory.memory_watch import held_bytes, slope

pytestmark = pytest.mark.slow

NUM_CYCLES, EVERY = 100, 5  # memory is read after so many
# Residents of some hundred kB, so that a copy of one that is left in every cycle is seen beside what Python does.
SHAPE = {"hidden_size": 64, "intermediate_size": 128}


def run_cycles(worker: Any, num: int, each: Callable[[dict[str, int]], None]) -> None:
    """Take all phases in order, without what is computed in them; only weights are really published."""
    cycle: Cycle = cycle_of(worker)
    for number in range(num):
        sizes: dict[str, int] = {}
        for phase in cycle:
            with worker.phase(phase):
                found = worker.leases.resident_bytes()
                assert {tag for tag, size in found.items() if size} == phase.tags
                sizes |= {f"{phase.name}/{tag}": found[tag] for tag in phase.tags}
                if phase.name == "publish":
                    side_of(worker).publish(100 + number)
        worker.memory_metrics()
        each(sizes)


def test_bytes_are_constant_and_memory_is_flat(tmp_path: Path) -> None:
    with sleeping_engine(), folders(tmp_path) as make:
        trainer: Trainer = make(case="ppo", engine="sleeping", max_steps=9, shape=SHAPE)
        trainer.step()
        trainer.step()
        worker: Any = worker_of(trainer)
        sizes: list[dict[str, int]] = []
        held: list[int] = []

        def each(found: dict[str, int]) -> None:
            sizes.append(found)
            if len(sizes) % EVERY == 0:
                gc.collect()
                held.append(held_bytes())

        run_cycles(worker, NUM_CYCLES, each)
        assert sizes == [sizes[0]] * NUM_CYCLES
        smallest = min(sizes[0].values())
        assert smallest > 50_000
        assert abs(slope(held)) / EVERY < 0.04 * smallest, held
        arena = arena_of(worker).slot_bytes()
        assert set(arena) == {"actor", "optimizer", "reference", "critic", "critic_optimizer", "reward_models"}
        trainer.step()  # and it still trains
