"""reasoning-gym in several turns: an answer that is not right is answered with its score, and may be tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.floor import RolloutClient, RolloutFunction
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import ConfigError, DataError

INSTRUCTIONS = "\n\nGive the final answer between <answer> and </answer>."


def reasoning_gym_rollout(
    dataset: Any, *, max_turns: int = 3, instructions: str = INSTRUCTIONS, per_turn: bool = False
) -> RolloutFunction:
    """Return a `rollout_func` for a reasoning-gym dataset; its rows are those of `reasoning_gym_rows(dataset)`.

    The reward of a trajectory is the score of its last answer.

    Args:
        dataset: of `reasoning_gym.create_dataset`; it scores the answers.
        max_turns: answers that a trajectory may give; it ends before if one is right (score 1).
        instructions: added to the question. An answer is what stands between <answer> and </answer>, else all of it.
        per_turn: give the change of the score as a reward at every turn, which sums up to the same.

    Raises:
        ConfigError: max_turns is below 1.
    """
    if max_turns < 1:
        raise ConfigError(f"reasoning_gym_rollout(max_turns={max_turns}): a trajectory needs at least one answer")

    async def rollout(rows: Sequence[dict[str, Any]], client: RolloutClient, **_: Any) -> list[Trajectory]:
        if not all("entry" in row for row in rows):
            raise DataError("a row has no column `entry`; make rows by reasoning_gym_rows(dataset)")

        async def run(row: Mapping[str, Any], trajectory: Trajectory) -> None:
            entry = dataset[int(row["entry"])]
            messages: Messages = [{"role": "user", "content": entry["question"] + instructions}]
            trajectory.prompt, score = list(messages), 0.0
            try:
                for left in reversed(range(max_turns)):
                    turn = await client.generate([*messages, *trajectory.messages], trajectory)
                    before, score = (
                        score,
                        float(await asyncio.to_thread(dataset.score_answer, _answer(turn.text), entry)),
                    )
                    if per_turn:
                        trajectory.add_reward(score - before, turn)
                    trajectory.messages.append(dict(turn.message))
                    if turn.finish_reason != "stop":
                        raise TrajectoryEndedError("length" if turn.finish_reason == "length" else "abort")
                    if score >= 1.0 or not left:
                        trajectory.end("stop")
                        return
                    again = f"That is not right: it scores {score:.2f} of 1. Try again."
                    trajectory.messages.append({"role": "user", "content": again})
            finally:
                trajectory.extra["score"] = score
                if not per_turn and trajectory.samples:
                    trajectory.add_reward(score)

        return await client.each(rows, run)

    return rollout


def reasoning_gym_rows(dataset: Any) -> list[dict[str, Any]]:
    """Return rows for `Dataset.from_list`: a question each, and its place in the dataset."""
    return [
        {"prompt": [{"role": "user", "content": dataset[place]["question"]}], "entry": place}
        for place in range(len(dataset))
    ]


def _answer(text: str) -> str:
    start = text.rfind("<answer>")
    return text[start + len("<answer>") :].split("</answer>")[0].strip() if start >= 0 else text.strip()
