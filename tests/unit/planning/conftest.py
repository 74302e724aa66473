"""Fixtures of plans."""

from collections.abc import Callable
from typing import Any

import pytest

from hybrid_rl.config import TrainerConfig
from hybrid_rl.planning import remedies
from hybrid_rl.planning.ledger import Budget
from hybrid_rl.planning.passes import Passes
from hybrid_rl.planning.phases import StepMemory
from tests.unit.planning.tiny_run import shape_of


@pytest.fixture
def step_of() -> Callable[..., StepMemory]:
    def make(config: TrainerConfig, **changes: Any) -> StepMemory:
        return StepMemory(Passes(shape_of(config, **changes)), config)

    return make


@pytest.fixture
def found_where(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Remedies in words, with a rule in place of a plan. fits: of a config and a budget."""

    def found(fits: Any, config: TrainerConfig, budget: Budget) -> list[str]:
        monkeypatch.setattr(remedies, "can_fit", lambda passes, config, budget: fits(config, budget))
        return [one.words for one in remedies.find_remedies(Passes(shape_of(config)), config, budget)]

    return found
