"""Datasets as they are published: recognised, read, said, and refused with row and column."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from hybrid_rl.data.formats import boxed, final_number
from hybrid_rl.data.prompts import PromptEncoder
from hybrid_rl.data.source import SizedSource, StreamSource, load_source
from hybrid_rl.errors import ConfigError, DataError

VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{n}+1"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "split": "train"},
    }
    for n in range(3)
]
GSM8K = [
    {"question": "1+1", "answer": "One and one.\n#### 2"},
    {"question": "999+1", "answer": "a b\n#### 1,000"},
]
MATH = [
    {
        "problem": "1+1",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"So $\boxed{2}$ is not $\boxed{\frac{1}{2}}$.",
    },
    {"problem": "2+2", "level": "Level 2", "type": "Algebra", "solution": r"It is \fbox{4}."},
]


def sized(dataset: Any, tokenizer: Any, **options: Any) -> SizedSource:
    source = load_source(dataset, PromptEncoder(tokenizer, max_prompt_length=None, **options))
    assert isinstance(source, SizedSource)
    return source


@pytest.mark.parametrize("form", ["list", "arrow", "hub"])
def test_verl_rows_are_read_as_they_are(chat_tokenizer: Any, form: str) -> None:
    """From each of the containers that all others become."""
    made: Any = {"list": list, "arrow": pyarrow.Table.from_pylist, "hub": datasets.Dataset.from_list}[form]
    source = sized(made(VERL), chat_tokenizer)
    assert [source[place].columns["answer"] for place in range(3)] == ["1", "2", "3"] == list(source.values("answer"))
    row = source[2].columns
    assert row["reward_model"]["ground_truth"] == "3" and row["extra_info"]["index"] == 2
    assert row["data_source"] == "openai/gsm8k" and "answer = reward_model.ground_truth" in source.note
    assert source[1].prompt == VERL[1]["prompt"]


def test_gsm8k_becomes_a_users_message_if_the_model_chats(tokenizer: Any, tmp_path: Path, ids_of: Any) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("\n".join(map(json.dumps, GSM8K)))
    plain = sized(path, tokenizer)
    assert plain[0].prompt == "1+1" and list(plain[0].prompt_ids) == ids_of("1+1")
    tokenizer.chat_template = "{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}"
    source = sized(path, tokenizer)
    assert source[1].prompt == [{"role": "user", "content": "999+1"}]
    assert list(source[1].prompt_ids) == ids_of("[999+1]")
    assert source[1].columns == {"question": "999+1", "answer": "1000", "solution": "a b\n#### 1,000"}
    assert source.note == (
        "read as GSM8K as published: prompt = question; answer = what follows ####; solution = the whole text"
    )
    assert sized(path, tokenizer, apply_chat_template=False)[0].prompt == "1+1"


def test_math_folder_of_files_and_lines(tokenizer: Any, tmp_path: Path) -> None:
    for split in ("train", "test"):
        for place, name in enumerate(("2", "10")):  # in numeric order
            (tmp_path / split / "algebra").mkdir(parents=True, exist_ok=True)
            (tmp_path / split / "algebra" / f"{name}.json").write_text(json.dumps(MATH[place], indent=2))
    with pytest.raises(DataError, match="holds the splits test, train; give one of them"):
        sized(tmp_path, tokenizer)
    folder = sized(tmp_path / "train", tokenizer)
    assert [folder[place].columns["answer"] for place in range(2)] == [r"\frac{1}{2}", "4"]
    (tmp_path / "train" / "algebra" / "5.json").mkdir()  # a folder is not a row
    assert len(sized(tmp_path / "train", tokenizer)) == 2
    lines = tmp_path / "math.json"
    lines.write_text(json.dumps(MATH))  # one array
    assert sized(lines, tokenizer).fingerprint == folder.fingerprint
    answered = sized([{**MATH[0], "answer": "7"}], tokenizer)  # MATH-500 brings its answers
    assert answered[0].columns["answer"] == "7"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"$\boxed{\left\{1, \frac{2}{3}\right\}}$", r"\left\{1, \frac{2}{3}\right\}"),
        (r"$\boxed 7$.", "7"),
        (r"\boxed{x\}}", r"x\}"),
        (r"\fbox{no}", "no"),
    ],
)
def test_boxes(text: str, answer: str) -> None:
    assert boxed(text) == answer


def test_numbers() -> None:
    assert [final_number(text) for text in ("#### 1,234,567", "a #### b\n#### -3.5", "####7 apples")] == [
        "1234567",
        "-3.5",
        "7 apples",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*GSM8K, {"question": "2", "answer": "two"}], r"row 2, column 'answer': no answer follows #### in 'two'"),
        ([*GSM8K, {"question": "2", "answer": None}], "row 2, column 'answer': None is of type NoneType"),
        ([*MATH, {**MATH[0], "solution": "two"}], r"row 2, column 'solution': no .boxed.*data.prompt_column=problem"),
        ([*MATH, {**MATH[0], "solution": r"\boxed{1"}], "row 2, column 'solution': .* does not end"),
        ([*VERL, {**VERL[0], "reward_model": None}], "row 3, column 'reward_model': None has no ground_truth"),
        ([*VERL, {**VERL[0], "prompt": None}], "row 3: the prompt None is of type NoneType"),
        ([{"question": "1+1", "answer": "2"}], "no `prompt` column; .*set data.prompt_column=question"),
        ([{"prompt": [{"role": "system", "content": "1"}]}], "row 0: .* have no message of a user, only of system"),
        ([{"prompt": [{"role": "user", "content": None}]}], "row 0, message 0: the content None"),
    ],
)
def test_what_cannot_be_read_is_refused_with_row_and_column(chat_tokenizer: Any, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        sized(rows, chat_tokenizer)


def test_a_column_is_the_prompt_if_it_is_named(chat_tokenizer: Any) -> None:
    rows = [{"question": "1+1", "answer": "x #### 2"}]
    source = sized(rows, chat_tokenizer, prompt_column="question")
    assert source[0].prompt == "1+1" and source.note == ""
    assert source[0].columns == {"question": "1+1", "answer": "x #### 2"}
    with pytest.raises(DataError, match="row 0 has no column 'ask' .data.prompt_column.; its columns are 'question'"):
        sized(rows, chat_tokenizer, prompt_column="ask")


def test_the_system_prompt_begins_every_prompt(chat_tokenizer: Any, ids_of: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1"}]}, {"prompt": [{"role": "user", "content": "2"}]}]
    source = sized(rows, chat_tokenizer, system_prompt="think")
    assert list(source[1].prompt_ids) == ids_of("[sthink][u2]/")
    assert source[1].prompt[0] == {"role": "system", "content": "think"} and rows[1]["prompt"][0]["role"] == "user"
    texts = [{"prompt": "1"}]
    with pytest.raises(DataError, match="row 0: the prompt '1' is text, .*apply_chat_template=true"):
        sized(texts, chat_tokenizer, system_prompt="think")
    both = sized(texts, chat_tokenizer, system_prompt="think", apply_chat_template=True)
    assert list(both[0].prompt_ids) == ids_of("[sthink][u1]/")
    twice = [{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "1"}]}]
    with pytest.raises(DataError, match="row 0: the prompt begins with a message of the system, 'a'"):
        sized(twice, chat_tokenizer, system_prompt="think")
    bare = sized([{"task": 1}], chat_tokenizer, system_prompt="think", needs_prompts=False)
    assert list(bare[0].prompt_ids) == ids_of("[sthink][u]/")  # an environment adds the rest


def test_text_needs_a_template_to_become_a_message(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="apply_chat_template=true, but the tokenizer has no chat template"):
        PromptEncoder(tokenizer, max_prompt_length=None, apply_chat_template=True)


def test_streams_are_read_in_the_same_way(chat_tokenizer: Any) -> None:
    encoder = PromptEncoder(chat_tokenizer, max_prompt_length=None)
    source = load_source(lambda: iter(GSM8K), encoder)
    assert isinstance(source, StreamSource) and "GSM8K" in source.note
    sized_source = sized(GSM8K, chat_tokenizer)
    assert list(source) == [sized_source[0], sized_source[1]]
    broken = load_source(lambda: iter([*GSM8K, {"question": "1", "answer": 5}]), encoder)
    assert isinstance(broken, StreamSource)
    with pytest.raises(DataError, match="row 2, column 'answer': 5 is of type int"):
        list(broken)
