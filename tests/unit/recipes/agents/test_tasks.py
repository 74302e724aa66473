"""The tasks of the recipes of agents: their tools, what is imitated before, and how conversations become tokens."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from hybrid_rl.agents.chat import Chat
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.quickstart.warm_start import IGNORED
from recipes.agents import calculator, guessing, run
from recipes.agents.chat import encode_conversations
from recipes.agents.guessing import HIGHEST, MOST_GUESSES, Guessing
from recipes.record_curves import AGENTS, settings_file

TASKS = {name: build(3) for name, build in AGENTS.items()}


def test_the_careless_worker_is_seldom_right() -> None:
    train = TASKS["agent_tools"].train
    said = TASKS["agent_tools"].conversations
    right = calculator.exact_answer([], [s[1:] for s in said], [row["answer"] for row in train])
    assert sum(right) / len(right) == pytest.approx(calculator.HABITS["calculate"], abs=0.02)
    calls = Counter(len(conversation) for conversation in said)
    assert calls[2] / len(said) == pytest.approx(calculator.HABITS["guess"], abs=0.03)
    assert set(calls) == {2, 4}
    rows = [row["prompt"][0]["content"] for part in (train, TASKS["agent_tools"].heldout) for row in part]
    assert len(set(rows)) == len(rows) == calculator.NUM_TRAIN + calculator.NUM_HELDOUT


@pytest.mark.parametrize("secret", range(1, HIGHEST + 1))
def test_who_halves_what_is_left_finds_every_number(secret: int) -> None:
    game = Guessing()
    game.reset(secret)
    low, high = 1, HIGHEST
    for _ in range(MOST_GUESSES):
        heard = game.guess((low + high) // 2)
        if heard == "right":
            break
        low, high = map(int, heard.split(" to "))
        assert low <= secret <= high
    assert game.get_reward() == 1.0
    game.reset(secret)
    assert game.get_reward() == 0.0


def test_a_game_has_so_many_guesses_and_no_more() -> None:
    """However many of them one answer holds."""
    game = Guessing()
    game.reset(7)
    assert [game.guess(1), game.guess(2), game.guess(2)] == ["2 to 7", "3 to 7", "3 to 7"]
    with pytest.raises(ValueError, match="no guess is left"):
        game.guess(7)
    assert game.get_reward() == 0.0
    assert guessing.careless_game({"prompt": [], "secret": 5}, random.Random(1))[-1]["role"] == "assistant"


@pytest.mark.parametrize("name", AGENTS)
def test_only_answers_are_imitated_and_tokens_are_whole_words(name: str) -> None:
    task = TASKS[name]
    tokenizer = task.tokenizer()
    chat = Chat(tokenizer)
    assert chat.call_format == "hermes"
    assert chat.problem_with_tools(task.tools) == ""
    said = task.conversations[:50]
    input_ids, labels = encode_conversations(tokenizer, said, task.tools)
    assert input_ids.shape == labels.shape and input_ids.shape[1] < task.max_length
    assert ((labels == IGNORED) | (labels == input_ids)).all()
    for conversation, row in zip(said, labels.tolist(), strict=True):
        answers = tokenizer.decode([token for token in row if token != IGNORED]).split("<|im_end|>")
        assert answers.pop() == ""
        turns = [message for message in conversation if message["role"] == "assistant"]
        read = [chat.read(answer) for answer in answers]
        assert [message["content"] for message in read] == [message["content"] for message in turns]
        wanted, found = (
            [[call["function"] for call in message.get("tool_calls", [])] for message in messages]
            for messages in (turns, read)
        )
        assert found == wanted
    texts = [tokenizer.decode([token]) for token in set(input_ids.flatten().tolist())]
    assert not [text for text in texts if text.isdigit() and len(text) > 1]
    assert tokenizer.unk_token_id not in input_ids


def test_rows_without_a_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Path(settings_file("agent_tools"))
    with pytest.raises(ConfigError, match="set model.path too"):
        run.main(["data.train_path=rows.jsonl"], settings, "", calculator.build_task)
    run.main(["--help"], settings, "AGENTS: the docstring", calculator.build_task)
    assert "AGENTS: the docstring" in capsys.readouterr().out
