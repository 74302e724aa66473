"""Requests of one trajectory that are under way together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hybrid_rl.agents.trajectory import Trajectory
from tests.unit.agents.scripted import ScriptedTokens, episode_of, text_of


def branches(seconds: list[float]) -> Trajectory:
    """One turn, then three at once that go on with it: two with equal prompts."""
    tokens = ScriptedTokens(lambda prompt: str(len(prompt)), delay=lambda number: seconds[number - 1])

    async def main() -> Trajectory:
        episode = episode_of(tokens)
        start: list[Any] = [{"role": "user", "content": "a"}]
        first = await episode.client.generate(start)
        ways = [[*start, first.message, {"role": "user", "content": text}] for text in ("b", "b", "ccc")]
        await asyncio.gather(*(episode.client.generate(way) for way in ways))
        return episode.trajectory

    return asyncio.run(main())


@pytest.mark.parametrize("seconds", [[0, 0, 0, 0], [0, 0.03, 0.02, 0.01], [0, 0.02, 0.01, 0.03]])
def test_the_order_of_answers_decides_nothing(seconds: list[float]) -> None:
    trajectory = branches(seconds)
    assert [(text_of(one.prompt_ids), text_of(one.token_ids)) for one in trajectory.samples] == [
        ("<s>[user]a\n[assistant]", "19</s>[user]b\n[assistant]40</s>"),
        ("<s>[user]a\n[assistant]19</s>[user]b\n[assistant]", "40</s>"),
        ("<s>[user]a\n[assistant]19</s>[user]ccc\n[assistant]", "42</s>"),
    ]
    told = [one.messages[-2]["content"] + one.messages[-1]["content"] for one in trajectory.conversations]
    assert told == ["a19", "b40", "b40", "ccc42"]
    assert (trajectory.counts["forks"], trajectory.counts["turns"]) == (2, 4)


def test_a_request_that_fails_leaves_its_place_free() -> None:
    answers = iter([ValueError("broken"), "1", "2"])
    tokens = ScriptedTokens(lambda _: next(answers))

    async def main() -> None:
        episode = episode_of(tokens)
        prompt = [{"role": "user", "content": "a"}]
        with pytest.raises(ValueError, match="broken"):
            await episode.client.generate(prompt)
        turn = await episode.client.generate(prompt)
        follows = await episode.client.generate([*prompt, turn.message, {"role": "user", "content": "b"}])
        episode.trajectory.add_reward(1.0, follows)
        kept = [sample for sample in episode.trajectory.samples if sample.token_ids]
        assert [text_of(sample.token_ids) for sample in kept] == ["1</s>[user]b\n[assistant]2</s>"]
        assert kept[0].turn_rewards == [None, 1.0]
        assert episode.trajectory.counts["forks"] == 0

    asyncio.run(main())
