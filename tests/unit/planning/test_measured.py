"""The plan of memory against training steps that were measured: every resident in every phase, and every peak."""

from __future__ import annotations

import pytest
import torch

from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS, KV_CACHE, OPTIMIZER
from tests.support.inside.workers import comparison_of
from tests.support.memory.measured_apart import MeasuredApart
from tests.support.memory.memory_cases import CONFIGS, SIZES, MeasuredStep, check, compared, predicted

# Everything that moves. What recomputes is counted against real passes in test_activations.py.
REPRESENTATIVE = {("wide", "offload")}
CASES = [
    pytest.param(size, config, marks=() if (size, config) in REPRESENTATIVE else pytest.mark.sweep)
    for size in SIZES
    for config in CONFIGS
    if config != "ranks"
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "config"), CASES)
def test_the_plan_of_a_step_is_within_five_percent(size: str, config: str, record_property) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        case = MeasuredStep(size, CONFIGS[config])
        rows = compared(predicted(size, case.config).phases, case.run())
    finally:
        torch.set_num_threads(before)
    check(rows)
    record_property("predictions", len(rows))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["trains", "generates"])
@pytest.mark.parametrize("keys", [{}, pytest.param({"lora.r": 8}, marks=pytest.mark.sweep)], ids=["all", "lora"])
def test_ranks_that_train_have_no_engine_and_those_that_generate_no_optimizer(side, keys, tmp_path) -> None:
    case = MeasuredApart("wide", {"rollout_ranks": 1, **keys})
    plan = predicted("wide", case.config)
    assert plan.generating is not None
    planned = plan if side == "trains" else plan.generating
    measured = case.run_side(tmp_path, trains=side == "trains")
    rows = compared(planned.phases, measured)
    check(rows, more_than=7)
    found = {row.what for row in rows if row.measured}
    assert found >= ({ACTOR, OPTIMIZER} if side == "trains" else {ACTOR, KV_CACHE})
    assert not found & ({ENGINE_WEIGHTS, KV_CACHE} if side == "trains" else {OPTIMIZER})
    phases = {"trains": {"score_actor", "update", "save"}, "generates": {"publish", "check", "generate"}}
    assert {memory.phase for memory in planned.phases} == phases[side]


def test_a_run_with_a_plan_compares_every_phase(make_trainer, records) -> None:
    """Weights, moments and the cache to the byte. What phases take at their peak is not counted on a CPU."""
    trainer = make_trainer(device_memory="1GB", beta=0.1)
    trainer.fit()
    lines = [line for line in records(trainer) if line["step"]]
    assert [line["memory/ledger_deviation"] for line in lines] == [0.0, 0.0]
    assert "memory/peak_deviation" not in lines[-1]
    comparison = comparison_of(trainer)
    assert {phase for phase, _ in comparison.latest} == {"publish", "check", "generate", "score_reference", "update"}
