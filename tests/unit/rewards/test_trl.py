"""Rewards with TRL's names against values that TRL's own functions gave (tests/reference/record_trl_rewards.py)."""

import json
from pathlib import Path

import pytest

from hybrid_rl import rewards
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards import RewardList, accuracy_reward
from tests.reference.record_trl_rewards import values

RECORDED = Path(__file__).parents[2] / "reference" / "trl_rewards.json"


def test_every_function_gives_what_trls_gives() -> None:
    theirs, ours = json.loads(RECORDED.read_text())["values"], values(rewards)
    assert ours.keys() == theirs.keys()
    for name, given in ours.items():
        assert [value is None for value in given] == [value is None for value in theirs[name]], name
        mine, known = ([value for value in side if value is not None] for side in (given, theirs[name]))
        assert mine == pytest.approx(known, rel=1e-12), name
        assert len({str(value) for value in given}) > 1, name  # no case that a constant would pass


def test_texts_are_taken_too_and_the_answer_is_kept() -> None:
    kept, texts = {}, [r"\boxed{\frac{1}{2}}", r"\boxed{3}", "none"]
    given = accuracy_reward(texts, ["0.5", "3", "4"], log_extra=lambda name, found: kept.update({name: found}))
    assert given == [1.0, 1.0, 0.0]
    assert kept == {"extracted_answer": ["1/2", "3", None]}


def test_they_have_trls_names_in_metrics_and_need_its_column() -> None:
    made = [rewards.get_cosine_scaled_reward(9), rewards.get_repetition_penalty_reward()]
    made += [rewards.get_soft_overlong_punishment(9, 3), accuracy_reward, rewards.think_format_reward]
    assert RewardList.of(made, ["solution"]).names == [
        *("cosine_scaled_reward", "repetition_penalty_reward", "soft_overlong_punishment_reward"),
        *("accuracy_reward", "think_format_reward"),
    ]
    with pytest.raises(ConfigError, match="requires the parameter 'solution'"):
        RewardList.of(accuracy_reward, ["answer"])
    with pytest.raises(ConfigError, match="max_penalty=0.5 would reward repetition"):
        rewards.get_repetition_penalty_reward(3, 0.5)
