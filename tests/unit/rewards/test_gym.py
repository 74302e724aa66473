"""The scorers of reasoning-gym on answers that they were not made for."""

import pytest
import reasoning_gym

from hybrid_rl.errors import DataError
from hybrid_rl.rewards import reasoning_gym_reward


def test_an_answer_that_the_scorer_chokes_on_is_wrong() -> None:
    """prime_factorization converts each part of an answer to an integer."""
    problem = reasoning_gym.create_dataset("prime_factorization", size=1, seed=42)[0]
    texts = [problem["answer"], "I do not know.", "2 x 3", "", f"<think>hm</think><answer>{problem['answer']}</answer>"]
    assert reasoning_gym_reward(texts, [problem] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_a_problem_that_cannot_be_scored_is_an_error() -> None:
    """Not a wrong answer: every answer to it would be."""
    problem = reasoning_gym.create_dataset("prime_factorization", size=1, seed=42)[0]
    with pytest.raises((ValueError, KeyError)):
        reasoning_gym_reward(["I do not know."], [{"metadata": problem["metadata"], "answer": "seven"}])
    with pytest.raises(DataError, match="which is no problem of reasoning-gym"):
        reasoning_gym_reward(["7"], [{"answer": "7"}])
