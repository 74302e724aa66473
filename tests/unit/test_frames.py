"""Few frames lie between a call and the work that it is for."""

from __future__ import annotations

from typing import Any

from tests.unit.frames import WORK, frames_of_a_run


def test_the_loss_is_four_calls_below_the_update_and_decode_attention_twelve_below_fit(make_trainer: Any) -> None:
    found = frames_of_a_run(make_trainer)
    assert found.keys() == WORK["inplace"].keys()
    stack = found["the loss"]
    below = stack[stack.index("workers/hybrid.py:update") + 1 :]
    assert len(below) <= 4, below
    assert below[:2] == ["training/actor.py:update", "training/loss.py:micro_batch_loss"]
    assert len(found["decode attention"]) <= 13, found["decode attention"]
