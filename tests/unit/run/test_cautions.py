"""Warnings about what would work, but not as it seems: each with the value to set, and none without cause."""

import json
from typing import Any

import pytest

from hybrid_rl.config import load_config
from hybrid_rl.data.mixture import load_sources
from hybrid_rl.data.prompts import PromptEncoder
from hybrid_rl.models import stop_token_ids
from hybrid_rl.run.cautions import PADDED_ROWS, caution, shared_prompts
from hybrid_rl.run.inputs import load_data
from tests.support.tiny import EOS_ID, VOCABULARY, build_model, build_tokenizer, sums

END, TURN = 4, "which is not a stop token"  # "]" closes messages
CHATS = sums(12, chat=True)


def closing_tokenizer() -> Any:
    """A tokenizer whose template ends each message with a token of its own, "]", which is not its EOS."""
    tokenizer = build_tokenizer(chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["]"]})
    return tokenizer


def look_at(rows: Any, held_out: Any = None, tokenizer: Any = None, model: Any = None, stops: Any = ()) -> None:
    """Have warned of what a run with these would be warned of."""
    tokenizer, model = tokenizer or build_tokenizer(), model or build_model()
    data = load_data(rows, held_out, load_config()[0], tokenizer, None)
    caution(data, tokenizer, model, stop_token_ids(model, tokenizer, list(stops)), list(stops))


@pytest.mark.parametrize(
    ("rows", "stops", "in_config", "warned"),
    [
        (CHATS, [], False, "stop_token_ids=[4]"),
        (CHATS, [7], False, "stop_token_ids=[7, 4]"),
        (CHATS, [4], False, None),
        (CHATS, [], True, None),  # generation_config names it
        (sums(12), [], False, None),  # texts: nothing is rendered
    ],
)
def test_the_token_that_ends_a_turn_must_stop(caplog, rows, stops, in_config, warned) -> None:
    model = build_model()
    if in_config:
        model.generation_config.eos_token_id = [EOS_ID, END]
    look_at(rows, tokenizer=closing_tokenizer(), model=model, stops=stops)
    assert (TURN in caplog.text) == (warned is not None)
    assert warned is None or f"the chat template ends an answer with ']', {TURN}" in caplog.text
    assert warned is None or warned in caplog.text


def test_prompts_that_are_in_both_are_found_token_by_token() -> None:
    """By hand, in a mixture and in a single set; rows without a prompt say nothing."""
    encoder = PromptEncoder(build_tokenizer(), max_prompt_length=None)

    def source(*texts: str) -> Any:
        return load_sources([{"prompt": text} for text in texts], encoder)

    assert list(shared_prompts(source("1+1=", "2", "3"), source("3", "4", "1+1=", "3"))) == [0, 2, 3]
    assert list(shared_prompts(source("12", "1"), source("2", "21"))) == []
    mixed = load_sources({"a": [{"prompt": "1"}], "b": [{"prompt": "2"}]}, encoder)
    assert list(shared_prompts(mixed, source("3", "2"))) == [1]
    bare = PromptEncoder(build_tokenizer(), max_prompt_length=None, needs_prompts=False)
    empty = load_sources([{"x": 1}, {"x": 2}], bare)
    assert list(shared_prompts(empty, empty)) == []


def test_evaluation_prompts_that_are_trained_on_are_a_warning(caplog) -> None:
    held_out = {"easy": [{"prompt": "5+5=", "answer": "10"}, sums(3)[2]], "new": [{"prompt": "9+9=", "answer": "18"}]}
    look_at(sums(12), held_out)
    assert "1 of the 2 prompts of the evaluation data 'easy' are trained on too (row 1 is the first)" in caplog.text
    assert "'new'" not in caplog.text and "reasoning-gym" not in caplog.text


@pytest.mark.parametrize(("seed", "num_shared"), [(43, 20), (60, 12), (1000, 0)])
def test_neighbouring_seeds_of_reasoning_gym_are_one_dataset(caplog, seed, num_shared) -> None:
    """Problem i is made from seed + i: of 30 problems from seed 42 on, 20 from seed 60 on share those of 60 to 71."""
    pytest.importorskip("reasoning_gym")
    task = "reasoning_gym:leg_counting?size={}&seed={}"
    look_at(task.format(30, 42), task.format(20, seed))
    told = f"{num_shared} of the 20 prompts of the evaluation data are trained on too"
    assert (told in caplog.text) == (num_shared > 0) == ("problem i of reasoning-gym" in caplog.text)


def test_a_vocabulary_far_larger_than_the_tokenizer_is_a_warning(caplog) -> None:
    size = len(VOCABULARY)
    look_at(sums(2), model=build_model(vocab_size=size + PADDED_ROWS))
    assert "the model embeds" not in caplog.text
    look_at(sums(2), model=build_model(vocab_size=size + PADDED_ROWS + 1))
    assert (
        f"the model embeds {size + 1025} tokens, the tokenizer has {size}: the other 1025 have no text" in caplog.text
    )


def test_a_bos_that_only_tokenizer_config_asks_for(make_trainer, caplog, tmp_path) -> None:
    """transformers goes by tokenizer.json; texts are told of it, messages have what the template writes."""
    tokenizer = build_tokenizer(chat=True)
    tokenizer.bos_token = "["
    tokenizer.save_pretrained(tmp_path / "it")
    file = tmp_path / "it" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_bos_token": True}))
    make_trainer(train_dataset=CHATS, tokenizer=str(tmp_path / "it"))
    assert "add_bos_token" not in caplog.text
    make_trainer(tokenizer=str(tmp_path / "it"))
    assert "add_bos_token=true, but tokenizer.json puts no '[' before a text" in caplog.text


def test_a_text_in_a_run_of_messages_is_told_once(make_trainer, caplog) -> None:
    trainer = make_trainer(train_dataset=CHATS, tokenizer=build_tokenizer(chat=True))
    trainer.generate([[{"role": "user", "content": "1+1="}], [{"role": "user", "content": "2"}]])
    trainer.generate("[u1]<eos>/")  # rendered
    assert "generate: the prompt" not in caplog.text
    trainer.generate("1+1=")
    trainer.generate("1+1=")
    assert caplog.text.count("generate: the prompt '1+1=' is completed as the text that it is") == 1
    caplog.clear()
    make_trainer().generate("1+1=")
    assert not caplog.text
