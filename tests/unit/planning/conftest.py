"""Fixtures of plans."""

from collections.abc import Callable
from typing import Any

import pytest

from hybrid_rl.config import TrainerConfig
from hybrid_rl.planning.passes import Passes
from hybrid_rl.planning.phases import StepMemory
from tests.unit.planning.tiny_run import shape_of


@pytest.fixture
def step_of() -> Callable[..., StepMemory]:
    def make(config: TrainerConfig, *, on_host: bool = False, **changes: Any) -> StepMemory:
        return StepMemory(Passes(shape_of(config, **changes)), config, on_host)

    return make
