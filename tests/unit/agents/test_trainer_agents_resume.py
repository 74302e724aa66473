"""A run of agents that Ctrl-C ended goes on as if nothing had happened, if its tools are deterministic."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from tests.support.agents.callers import build_policy
from tests.support.tiny import spread

pytestmark = pytest.mark.slow  # the file as a whole

CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 20, "b": 3}), ("add", {"a": "x", "b": 1}), ("move", {"by": 5})]
KEYS: dict[str, Any] = {
    "max_steps": 3,
    "prompts_per_step": 3,
    "num_generations": 3,
    "max_completion_length": 120,
    "max_prompt_length": 100,
    "max_tool_calling_iterations": 3,
    "learning_rate": 1e-3,
    "save_steps": 1,
    "run_name": "run",
}
ROWS = [{"prompt": [{"role": "user", "content": str(start)}], "start": start} for start in range(7)]
# Depend on which sequences the engine computes together, and so on the time that tools take: the last bits of logprobs
# in the rollout, and counts of its own.
TIMED = (
    *("agents/recorded_", "agents/repeated_calls", "agents/open_max"),
    *("agents/prefix_hit_share", "mismatch/", "sampling/", "rollout/", "engine/"),
)
calls_until_interrupt = 0


class Line:
    """A place on a line."""

    def __init__(self) -> None:
        self.place = 0

    def reset(self, start: int, **row: Any) -> str:
        self.place = start
        return f" at {start}"

    def move(self, by: int) -> str:
        """Move.

        Args:
            by: how far
        """
        self.place += by
        return str(self.place)

    def get_reward(self) -> float:
        return self.place / 10


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: another
    """
    global calls_until_interrupt
    calls_until_interrupt -= 1
    if calls_until_interrupt == 0:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(random.random() / 300)
    return a + b


def untimed(lines: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Metrics of each training step that do not depend on when tools answered."""
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines if line["step"]}


def test_a_run_that_ctrl_c_ended_resumes_as_if_it_had_not(
    make_trainer: Callable[..., Trainer], records: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Tools take other times in both runs; every sample has the same tokens and reward nonetheless."""
    global calls_until_interrupt

    def trainer(folder: str, **keys: Any) -> Trainer:
        model, tokenizer = build_policy(CALLS)
        keys |= {"tools": [add], "environment_factory": Line, "output_dir": str(tmp_path / folder)}
        return make_trainer(model, spread, ROWS, tokenizer=tokenizer, **(KEYS | keys))

    straight = trainer("straight")
    straight.fit()
    broken = trainer("broken")
    broken.step()
    calls_until_interrupt = 5
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    steps_done = broken.global_step
    assert 1 <= steps_done < 3 and calls_until_interrupt <= 0
    resumed = trainer("broken", resume="auto")
    assert resumed.run_folder == broken.run_folder and resumed.global_step == steps_done
    resumed.fit()
    mine, theirs = (untimed(records(one, comparable=True)) for one in (resumed, straight))
    assert mine == theirs
    first, second = (records(one, name="samples.jsonl") for one in (resumed, straight))
    assert first == second
    assert any(len(sample["tokens"]) > 2 for sample in first)
