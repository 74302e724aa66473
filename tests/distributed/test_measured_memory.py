"""The plan of memory against training steps of two ranks that were measured, with shards that stay and that leave."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.controller.ranks import object_gather
from tests.distributed.ranks import run_ranks
from tests.support.memory.measured_memory import Measured
from tests.support.memory.memory_cases import CONFIGS, SIZES, MeasuredStep, check, compared, config_of, predicted

pytestmark = pytest.mark.slow  # processes are started

LEAVING = {"offload": ["actor", "optimizer"]}
CASES = [
    pytest.param(size, keys, marks=() if (size, keys) == ("wide", LEAVING) else pytest.mark.sweep, id=f"{size}-{name}")
    for size in SIZES
    for name, keys in (("stays", {}), ("leaves", LEAVING), ("lora", CONFIGS["lora"]))
]


def measured(rank: int, num_ranks: int, size: str, keys: dict[str, Any]) -> dict[str, Measured]:
    gather = object_gather(num_ranks, timedelta(seconds=60))
    context = RankContext(rank=rank, mesh=RankMesh(dp_shard=num_ranks), device=torch.device("cpu"), gather=gather)
    return MeasuredStep(size, keys, context).run()


@pytest.mark.parametrize(
    ("size", "keys"), CASES, ids=lambda value: value if isinstance(value, str) else str(len(value))
)
def test_the_plan_of_every_rank_is_within_five_percent(size: str, keys: dict[str, Any], record_property) -> None:
    keys = CONFIGS["ranks"] | keys
    planned = predicted(size, config_of(keys)).phases
    for found in run_ranks(measured, 2, size, keys, preloaded=("tests.support.memory.memory_cases",)):
        rows = compared(planned, found)
        # All weights are gathered block by block: the buffer of a block is seen together with the next, or is not.
        check(rows, early_bytes=max(row.measured for row in rows if row.what == "engine_weights") // 2)
        record_property("predictions", len(rows))
