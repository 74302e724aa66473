"""Trajectories with agents within them: each sample knows its own conversation, and rewards see the main one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.rollout.agent_columns import Attempt, agent_metrics, reward_input, trajectory_columns
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from tests.unit.agents.scripted import ByteChat, ScriptedTokens, episode_of, text_of

CALL = RolloutCall(1, SamplingParams(9), 7, None, "test", 100)
decode = ByteChat().decode


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def attempt_of(prompts: Sequence[list[dict[str, Any]]], answers: Sequence[str], asked: Any) -> Attempt:
    """An attempt at a row whose prompt is `asked`, of which these prompts were asked in this order."""
    replies = iter(answers)

    async def main() -> Trajectory:
        episode = episode_of(ScriptedTokens(lambda _: next(replies)), {"prompt": asked})
        for prompt in prompts:
            await episode.client.generate(prompt)
        return episode.trajectory

    row = PromptRow(0, asked, (1,), {})
    return Attempt(RolloutTask(0, row), 0, 100, asyncio.run(main()))


PLAN, SUB = [user("plan")], [user("look it up")]
REWRITTEN = [user("plan"), said("shorter"), user("go on")]


@pytest.mark.parametrize(
    ("prompts", "main", "turns", "forks"),
    [
        pytest.param([PLAN, SUB], [said("a0")], [SUB, PLAN], 0, id="the sub-agent speaks last"),
        pytest.param([SUB, PLAN], [said("a1")], [SUB, PLAN], 0, id="the sub-agent speaks first"),
        pytest.param(
            [PLAN, SUB, [*PLAN, said("a0"), user("b")]],
            [said("a0"), user("b"), said("a2")],
            [SUB, PLAN],
            0,
            id="the main one goes on",
        ),
        pytest.param(
            [PLAN, REWRITTEN, SUB],
            [said("shorter"), user("go on"), said("a1")],
            [SUB, PLAN, REWRITTEN],
            1,
            id="its history is rewritten",
        ),
        pytest.param(
            [PLAN, SUB, [said("a0"), user("b")]],
            [said("a2")],
            [SUB, PLAN, [said("a0"), user("b")]],
            1,
            id="its prompt is dropped",
        ),
    ],
)
def test_rewards_see_the_main_conversation(prompts: Any, main: Any, turns: Any, forks: int) -> None:
    attempt = attempt_of(prompts, ["a0", "a1", "a2"], PLAN)
    seen = reward_input(attempt, decode)
    assert (seen.prompt, seen.completion) == (PLAN, main)
    assert text_of(seen.completion_ids).endswith(main[-1]["content"] + "</s>")
    columns = trajectory_columns([attempt], CALL, decode)
    rendered = ["".join(f"[{one['role']}]{one['content']}\n" for one in turn) + "[assistant]" for turn in turns]
    assert [text_of(ids.tolist()) for ids in columns["prompt_ids"]] == [f"<s>{text}" for text in rendered]
    assert columns["turn"].tolist() == list(range(len(turns)))
    # Each sample has its own prompt and what followed it.
    place = prompts.index(SUB)
    assert columns["prompt"][0] == SUB and columns["conversation"][0]["messages"] == [said(f"a{place}")]
    assert columns["prompt"][1:] == [PLAN] * (len(turns) - 1)
    assert columns["conversation"][-1]["messages"] == main
    found = agent_metrics([attempt]).result()
    assert (found["agents/forks"], found["agents/sub_agents"]) == (forks, 1)
