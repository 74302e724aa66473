"""Few frames lie between a call and the work that it is for."""

from __future__ import annotations

from typing import Any

from tests.unit.frames import WORK, frames_of_a_run


def test_the_equation_of_the_loss_is_eight_frames_deep_and_decode_attention_thirteen(make_trainer: Any) -> None:
    found = frames_of_a_run(make_trainer)
    assert found.keys() == WORK["inplace"].keys()
    assert found["the loss"] == [
        "run/trainer.py:fit",
        "run/trainer.py:step",
        "workers/groups.py:update",
        "controller/local.py:call",
        "workers/hybrid.py:update",
        "training/actor.py:update",
        "training/loss.py:micro_batch_loss",
        "algos/policy_losses/clip.py:loss",
    ]
    assert len(found["decode attention"]) == 13, found["decode attention"]
