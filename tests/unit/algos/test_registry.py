"""Algorithm records fit their functions and their config, and the room stands alone."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

from hybrid_rl.algos import ALGORITHMS
from hybrid_rl.config.schema import UNIONS

HEAVY = ("transformers", "omegaconf", "datasets", "rich", "matplotlib")


def test_records_are_the_configs_members() -> None:
    assert set(ALGORITHMS) == set(UNIONS["algorithm"].members)
    assert all(record.name == name for name, record in ALGORITHMS.items())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_are_leaves_and_keywords(name: str) -> None:
    record = ALGORITHMS[name]
    leaves = {field.name for field in dataclasses.fields(UNIONS["algorithm"].members[name])}
    for function, options in (
        (record.advantage, record.advantage_options),
        (record.policy_loss, record.loss_options),
    ):
        assert set(options) <= leaves
        keywords = {
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        assert set(options) == keywords


def test_importing_algos_loads_torch_and_nothing_heavy() -> None:
    code = f"import sys, hybrid_rl.algos; print('torch' in sys.modules, [m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split(maxsplit=1) == ["True", "[]\n"]
