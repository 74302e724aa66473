"""`hybrid-rl train`: its two words besides keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rl.cli.key_values import take
from hybrid_rl.cli.train import load_reward
from hybrid_rl.errors import ConfigError


def test_take() -> None:
    assert take("reward", ["a=1", "reward=x.py:f", "reward=y.py:g"]) == (["x.py:f", "y.py:g"], ["a=1"])
    assert take("reward", ["rewards.x=1"]) == ([], ["rewards.x=1"])


@pytest.mark.parametrize("reference", ["no_colon", "missing.py:f", ":f"])
def test_load_reward_refuses_what_is_no_file(reference: str) -> None:
    with pytest.raises(ConfigError, match="is not FILE.py:FUNCTION"):
        load_reward(reference)


def test_a_misspelt_reward_is_recognised() -> None:
    with pytest.raises(ConfigError, match="did you mean 'math_reward'"):
        load_reward("math_rewad")


def test_load_reward_refuses_a_function_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score():\n    return 1\n")
    assert load_reward(f"{tmp_path / 'mine.py'}:score")() == 1
    with pytest.raises(ConfigError, match="has no 'scores'"):
        load_reward(f"{tmp_path / 'mine.py'}:scores")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\ndef f(:\n", r"SyntaxError: invalid syntax \(mine.py, line 2\)"),
        ("a = 1\n\nraise ValueError('no key')\n", "ValueError in line 3: no key"),
        ("import sys\nsys.exit(3)\n", "SystemExit in line 2: 3"),
        ("import nowhere_at_all\n", "ModuleNotFoundError in line 1: No module named 'nowhere_at_all'"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=f"reward='.*mine.py:f': .*mine.py cannot be imported: {message}; correct"):
        load_reward(f"{tmp_path / 'mine.py'}:f")


def test_ready_made_rewards_go_by_their_names() -> None:
    assert load_reward("exact_match")(completions=["4", "5"], answer=["4", "4"]) == [1.0, 0.0]
    assert load_reward("tag_count_reward")(completions=["<think>"]) == [0.25]
