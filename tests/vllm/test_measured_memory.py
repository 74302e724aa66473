"""The plan of memory against training steps over vLLM that were measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.support.libraries.vllm_names import inspect_here
from tests.support.memory.measured_memory import Measured
from tests.support.memory.memory_cases import (
    CONFIGS,
    SIZES,
    VLLM_KEYS,
    MeasuredStep,
    check,
    compared,
    config_of,
    predicted,
)

pytestmark = pytest.mark.slow

RANK_KEYS = {"engine_args.max_num_batched_tokens": 64}  # the longest sequence, the least that vLLM takes
CASES = [
    pytest.param(size, config, marks=() if (size, config) == ("wordy", "plain") else pytest.mark.sweep)
    for size in SIZES
    for config in CONFIGS
    if config != "ranks"
]


@pytest.mark.parametrize(("size", "config"), CASES)
def test_the_plan_of_a_step_is_within_five_percent(size: str, config: str, record_property) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        case = MeasuredStep(size, CONFIGS[config] | VLLM_KEYS)
        rows = compared(predicted(size, case.config).phases, case.run())
    finally:
        torch.set_num_threads(before)
    check(rows)
    record_property("predictions", len(rows))


@pytest.mark.sweep
@pytest.mark.parametrize("keys", [{}, {"offload": ["actor", "optimizer"]}], ids=["stays", "leaves"])
@pytest.mark.parametrize("size", SIZES)
def test_the_plan_of_every_rank_is_within_five_percent(size: str, keys: dict[str, Any], record_property) -> None:
    keys = CONFIGS["ranks"] | VLLM_KEYS | RANK_KEYS | keys
    planned = predicted(size, config_of(keys)).phases
    for found in run_ranks(of_rank, 2, size, keys):
        rows = compared(planned, found)
        check(rows)
        record_property("predictions", len(rows))


def of_rank(rank: int, num_ranks: int, size: str, keys: dict[str, Any]) -> dict[str, Measured]:
    from tests.distributed.test_measured_memory import measured

    inspect_here()  # as `inspected_here`, for this process
    return measured(rank, num_ranks, size, keys)
