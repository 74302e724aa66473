"""The memory of a rank against a plan: every phase of a step, on the residents that the worker really has."""

from __future__ import annotations

import logging

import pytest

from hybrid_rl.memory.comparison import Expected
from tests.support.inside.workers import comparison_of

# 45 x 16 embeddings, tied; two layers of 272 + 136 + 136 + 256 attention, 1,536 MLP and 32 norms; a norm: float32.
ACTOR_BYTES = (720 + 2 * 2368 + 16) * 4
OPTIMIZER_BYTES = 2 * ACTOR_BYTES + 26 * 4  # two moments, and a step counter for each of 26 tensors
CACHE_BYTES = 2 * 16 * 16 * (8 + 16) * 4  # of 2 layers: 16 blocks of 16 tokens, keys of 8, values of 16 (padded)
ALWAYS = {"actor": ACTOR_BYTES, "optimizer": OPTIMIZER_BYTES}


def plan(**changes: dict[str, int]) -> Expected:
    residents = {"publish": ALWAYS, "update": ALWAYS, "generate": {**ALWAYS, "kv_cache": CACHE_BYTES}} | changes
    return Expected(residents, dict.fromkeys(residents, 10**9))


def test_a_step_that_takes_what_was_planned_deviates_by_nothing(make_bench, caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench(expected=plan(), kv_cache_memory_bytes=CACHE_BYTES)
    bench.memory()
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        bench.train()
    metrics = bench.memory()
    assert metrics["memory/ledger_deviation"] == 0.0
    assert "memory/peak_deviation" not in metrics  # a CPU does not count
    assert not caplog.records


def test_every_phase_is_compared_with_its_own_part_of_the_plan(make_bench, caplog: pytest.LogCaptureFixture) -> None:
    """The plan has the cache in memory while the policy learns, and the optimizer asleep while it generates."""
    wrong = plan(update={**ALWAYS, "kv_cache": CACHE_BYTES}, generate={"actor": ACTOR_BYTES, "kv_cache": CACHE_BYTES})
    bench = make_bench(expected=wrong, kv_cache_memory_bytes=CACHE_BYTES)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        bench.train()
    assert bench.memory()["memory/ledger_deviation"] == 1.0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith(f"memory: optimizer takes {OPTIMIZER_BYTES:,} bytes in the phase 'generate', 100% more")
    assert told[1].startswith("memory: kv_cache takes 0 bytes in the phase 'update', 100% less")


def test_without_a_plan_nothing_is_compared(make_bench) -> None:
    bench = make_bench()
    bench.train()
    assert comparison_of(bench.worker) is None
    assert not [name for name in bench.memory() if name.endswith("_deviation")]
