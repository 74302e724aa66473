"""The models that are planned are whole, and the ranks that are planned have traces."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import plan
from hybrid_rl.resharding.tiling import check_tiling

pytestmark = pytest.mark.slow

PARAMETERS = {"qwen2.5-7b": 7_615_616_512, "qwen2.5-72b": 72_706_203_648, "qwen3-30b-a3b": 30_532_122_624}
PARAMETERS["deepseek-v3"] = 671_026_419_200  # without the module that predicts several tokens


@pytest.mark.parametrize("case", sorted({(case.model, case.tp) for case in plan.CASES}))
def test_every_element_of_the_engine_is_taken_once(case: tuple[str, int]) -> None:
    model, tp = case
    for rank in sorted({0, tp - 1}):
        trace = plan.Case(model, tp, num_ranks=tp).trace(rank)
        check_tiling(trace)
        assert sum(spec.num_bytes // spec.dtype.itemsize for spec in trace.sources) == PARAMETERS[model]
        size = sum(spec.num_elements for spec in trace.destinations)
        assert size == PARAMETERS[model] if tp == 1 else PARAMETERS[model] / tp < size < PARAMETERS[model] / tp * 1.1


def test_ranks_are_the_first_or_last_of_their_engines() -> None:
    assert plan.Case("qwen3-30b-a3b", 4, 64).ranks(5) == [0, 15, 28, 47, 60]


def test_gathering_receives_everything_that_a_rank_does_not_hold() -> None:
    line = plan.measure(plan.Case("qwen2.5-7b", 2, 8), Namespace(repeats=2))
    full_bytes = 4 * PARAMETERS["qwen2.5-7b"]
    assert line["gather_remote_bytes"] == 0
    assert full_bytes * 0.87 < line["gather_host_bytes"] < full_bytes * 0.88  # 7 of 8 ranks hold it
    assert line["local_read_bytes"] + line["host_read_bytes"] == 2 * line["written_bytes"]
    assert line["written_bytes"] == line["minimum_written_bytes"]
    # Full in fp32, full in bf16, and the rank's half of it.
    assert line["gather_written_bytes"] == full_bytes * 3 / 2 + line["written_bytes"]
