"""Tools, an environment and a chat template under which trajectories differ in everything: turns, budgets, delays,
exceptions, calls that cannot be made, and histories that the template rewrites."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import torch

from tests.support.agents.callers import TEMPLATE, build_policy

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("add", {"a": 1, "b": 2}),
    ("add", {"a": 30, "b": 4}),
    ("add", {"a": "x", "b": 4}),  # cannot be made
    ("look_up", {"word": "moon"}),
    ("look_up", {"word": "night"}),  # raises
    ("long", {"count": 150}),
    ("move", {"by": 3}),
    ("unknown", {}),
]
# Older answers lose their k, as thoughts are dropped by templates of reasoning models.
FORGETFUL = TEMPLATE.replace(
    "{{ m.content or '' }}",
    "{{ (m.content or '').replace('k', '') if m.role == 'assistant' and loop.revindex > 3 else (m.content or '') }}",
)
assert FORGETFUL != TEMPLATE
SETTINGS: dict[str, Any] = {
    "num_generations": 8,
    "max_completion_length": 240,
    "max_prompt_length": 48,
    "max_tool_calling_iterations": 3,
    "max_steps": 1,
    "learning_rate": 1e-3,
    "old_logprobs": "recompute",
}
noise = random.Random()  # of delays alone: other ones in each run
COLUMNS = ("prompt_ids", "completion_ids", "completion_mask", "policy_version")
NUMBERS = ("group", "trajectory", "turn", "rewards", "policy_length")


class Line:
    """A place on a line; its reward is how far it went."""

    def __init__(self) -> None:
        self.place = 0

    def reset(self, start: int, **row: Any) -> str:
        time.sleep(delay())
        self.place = start
        return f" at {start}"

    def move(self, by: int) -> str:
        """Move.

        Args:
            by: how far
        """
        time.sleep(delay())
        self.place += by
        if self.place % 5 == 0:
            raise ValueError("a hole")
        return f"now {self.place}"

    def get_reward(self) -> float:
        return self.place / 10


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: another
    """
    time.sleep(delay())
    return a + b


async def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: it
    """
    await asyncio.sleep(delay())
    return {"moon": "round"}[word]


def long(count: int) -> str:
    """Write much.

    Args:
        count: how many letters
    """
    return "z" * count


TOOLS = [add, look_up, long]


def delay() -> float:
    """Seconds, with a heavy tail."""
    return noise.random() ** 6 * 0.02


def caller(**shape: Any) -> tuple[Any, Any]:
    """A policy that calls these tools at random, with thoughts that are dropped, and its tokenizer."""
    model, tokenizer = build_policy(CALLS, favour={"k": 1.0, "m": 0.5, "<eos>": 5.0}, **shape)
    tokenizer.chat_template = FORGETFUL
    return model, tokenizer


def rows(count: int) -> list[dict[str, Any]]:
    """Rows of a dataset with the column that `Line` wants."""
    return [{"prompt": [{"role": "user", "content": f"q{number}"}], "start": number} for number in range(count)]


def gaps(batch: Any) -> float:
    """Return the largest difference of the engine's logprobs from the trainer's, over tokens of the policy."""
    mask = batch["completion_mask"].values
    made, own = batch["rollout_logprobs"].values, batch["old_logprobs"].values
    assert made[~mask].eq(0).all() and batch["policy_version"].values[~mask].eq(-1).all()
    assert 0.03 < mask.double().mean() < 0.9
    return float((made - own)[mask].abs().max())


def gap_between(batch: Any, other: Any) -> float:
    """Return the largest difference of logprobs of two rollouts; all else is equal."""
    for name in COLUMNS:
        assert torch.equal(batch[name].values, other[name].values), name
        assert torch.equal(batch[name].offsets, other[name].offsets), name
    for name in NUMBERS:
        torch.testing.assert_close(batch[name], other[name], rtol=0, atol=0, equal_nan=True)
    assert batch["finish_reason"] == other["finish_reason"]
    return float((batch["rollout_logprobs"].values - other["rollout_logprobs"].values).abs().max())


def is_varied(metrics: Any, reasons: set[str], num_trajectories: int) -> bool:
    """Whether trajectories were as different as they should be."""
    return bool(
        reasons >= {"stop", "length", "turns"}
        and metrics["agents/forks"] > num_trajectories / 40
        and metrics["tools/call_frequency"] > 1
        and 0.2 < metrics["tools/failure_frequency"] < 0.8
    )
