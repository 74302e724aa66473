"""The plan of memory against training steps over vLLM that were measured."""

from __future__ import annotations

import pytest
import torch

from tests.memory_cases import CONFIGS, SIZES, VLLM_KEYS, MeasuredStep, check, compared, predicted

pytestmark = pytest.mark.slow

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
