"""The reward of reasoning-gym's problems: the score that their own task gives to an answer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from hybrid_rl.data.gym_rows import ENTRY_COLUMN, reasoning_gym
from hybrid_rl.data.prompts import Messages, shorten
from hybrid_rl.errors import DataError
from hybrid_rl.rewards.completions import completion_texts

TAGS = ("<answer>", "</answer>")


def reasoning_gym_reward(
    completions: Sequence[str | Messages],
    entry: Sequence[Any],
    completion_openings: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Give the score of each answer, 0 to 1, by the task that made the problem; None for a sample without a problem.

    The answer is what stands between the last <answer> and </answer> of a completion, or else all of it; of a
    completion with </think> only what follows it is read. An answer on which the task's own scorer raises an exception,
    although it takes the problem's, is wrong: 0. entry: the column that `reasoning_gym:TASK` makes.
    """
    texts = completion_texts(completions, completion_openings, thinking=False)
    return [
        None if problem is None else _score(answer_in(text), problem)
        for text, problem in zip(texts, entry, strict=True)
    ]


def answer_in(text: str) -> str:
    """Return the answer in what was said after the thinking."""
    before, tag, rest = text.rpartition(TAGS[0])
    return (rest.partition(TAGS[1])[0] if tag else text).strip()


def _score(answer: str, problem: Any) -> float:
    if not isinstance(problem, Mapping) or "source_dataset" not in problem.get("metadata", {}):
        raise DataError(
            f"the column {ENTRY_COLUMN!r} holds {shorten(problem)}, which is no problem of reasoning-gym; make rows by "
            'train_dataset="reasoning_gym:TASK"'
        )
    score = _scorer(problem["metadata"]["source_dataset"])
    # None is no answer: to "" some scorers give the credit of a wrong one.
    said = answer if answer or not problem.get("answer") else None
    try:
        return float(score(said, problem))
    except Exception:  # some scorers convert an answer to numbers as it is
        score(str(problem.get("answer")), problem)  # a problem that cannot be scored at all
        return 0.0


@cache
def _scorer(task: str) -> Callable[[str | None, Any], float]:
    reasoning_gym("reasoning_gym_reward")
    scorer: Callable[[str | None, Any], float] = importlib.import_module("reasoning_gym.factory").get_score_answer_fn(
        task
    )
    return scorer
