"""A look at data: what is shown, counted and refused, on 80 columns and as JSON."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import preview
from hybrid_rl.cli import main
from hybrid_rl.rewards import exact_match

MESSY = [
    '{"prompt": "1+1", "answer": 2}',
    '{"prompt": "11+11", "answer": null}',
    '{"prompt": broken',
    '{"prompt": "1+1", "answer": "2"}',
    '{"prompt": null, "answer": 3}',
    '{"prompt": "2"}',
    '{"prompt": [{"role": "user", "content": "3"}], "answer": 3}',
    '{"prompt": "1+1+1+1+1", "answer": 5}',
]


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    path = tmp_path / "messy.jsonl"
    path.write_text("\n".join(MESSY))
    return path


def test_everything_that_would_be_refused_is_told_at_once(messy: Path, tokenizer: Any) -> None:
    found = preview(messy, tokenizer=tokenizer, max_prompt_length=5)
    (one,) = found.train
    assert [row for row, _ in one.refused] == [None, 3, 4, 5] and "line 3: not valid JSON" in one.refused[0][1]
    assert "row 3: the prompt None" in one.refused[1][1] and "row 4: its columns differ" in one.refused[2][1]
    assert "row 5: the prompt is messages, but those before are text" in one.refused[3][1]
    assert one.lengths == [3, 5, 3, 9] and one.too_long == [6] and one.duplicates == [(2, 0)]
    assert one.columns["answer"][0] == {"int": 4, "null": 1, "str": 1}  # of the rows that have the columns of row 0
    assert one.quantiles() == {"50 %": 5, "90 %": 9, "99 %": 9, "max": 9}
    assert sum(count for _, _, count in one.histogram()) == 4 and one.histogram()[0] == (3, 3, 2)
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "over max_prompt_length=5: 1 (25.0%), which would be refused, the first is row 6" in text.replace("\n ", "")
    assert "would be refused: 3 of 7 rows, and 1 line without a row" in text and "a run would refuse this data" in text
    assert not preview([{"prompt": "1+1"}], tokenizer=tokenizer, max_prompt_length=2).would_start
    assert preview([{"prompt": "1"}, {"prompt": "1+1"}], tokenizer=tokenizer, overlong_prompts="drop").would_start


def test_nothing_in_a_prompt_acts_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.jsonl"
    rows = [{"prompt": "a\x1b[31m\u202eb\0 é", "answer": "1"}, {"prompt": "half \ud800", "answer": "2"}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert main(["data", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "  | a␛[31m\\u202eb␀ é\n" in shown and not {"\x1b", "\u202e", "\0"} & set(shown)
    assert "row 1: the prompt has half a character, '\\ud800'; correct the row" in shown
    assert main(["data", str(path), "--json"]) == 1
    out = capsys.readouterr().out
    assert out.isascii() and json.loads(out)["train"][0]["shown"][0]["text"] == rows[0]["prompt"]


def test_what_a_locale_cannot_show_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"prompt": "é", "answer": "1"}', encoding="utf-8")
    out = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
        assert main(["data", str(path)]) == 0
        sys.stdout.flush()
        assert b"  | \\xe9\n" in out.getvalue()


def test_what_the_model_sees_has_its_special_tokens(chat_tokenizer: Any) -> None:
    rows = [{"question": "1+1", "answer": "x #### 2"}]
    (one,) = preview(rows, tokenizer=chat_tokenizer, system_prompt="think").train
    assert one.shown[0].text == "[sthink][u1+1]/" and one.shown[0].columns["answer"] == "2"
    assert one.lengths == [15] and "GSM8K as published" in one.note
    (kwargs,) = preview(rows, tokenizer=chat_tokenizer, chat_template_kwargs={"think": True}).train
    assert kwargs.shown[0].text == "[u1+1]/think"
    (plain,) = preview(rows, system_prompt="think").train  # without a model
    assert plain.shown[0].text == "[system] think\n[user] 1+1" and plain.unit == "characters"


def test_overlap_and_what_rewards_need() -> None:
    def length_close_to(completions: Any, target: Any, **kwargs: Any) -> list[float]:
        return [0.0 for _ in completions]

    rows = [{"prompt": "1"}, {"prompt": "2"}]
    found = preview({"a": rows[:1], "b": rows[1:]}, rows[1:], reward_funcs=[length_close_to])
    assert found.shared == (("a list", 0, "b", 0),)
    assert "length_close_to: target: missing: target" in str(found)
    assert "prompts of evaluation that are trained on: 1; the first: row 0 is training row 0" in str(found)


def test_answers_that_no_reward_can_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*answers: Any, **keys: Any) -> str:
        rows = [{"prompt": str(place), "answer": answer} for place, answer in enumerate(answers)]
        return " ".join(str(preview(rows, **keys)).split())

    assert shown(None, None).count("there, but null in 2 of 2 rows") == 3  # exact_match, gsm8k_reward and math_reward
    assert "a run would take this data, but its rewards would end it or teach nothing: see above" in shown(None, "1")
    assert "a run would take this data, but" not in shown(*("1" * 19), None)  # 5 % may have no reward
    assert "a run would take this data, but" not in shown(*("1" * 3), None, max_reward_failure_share=0.3)
    targets = shown({"target": ["a", "b"]}, ["a"], "a", reward_funcs=exact_match)
    assert "exact_match: answer: there, but dict, list in 2 of 3 rows, which it cannot compare" in targets
    assert "a run would take this data, but" in targets

    def own(completions: Any, answer: Any) -> list[float]:
        return [0.0 for _ in completions]

    assert "own: answer: there, but null in 1 of 2 rows" in shown(None, "1", reward_funcs=own)
    assert "a run would take this data, but" not in shown(None, {"a": 1}, reward_funcs=own)
    found = preview([{"prompt": "1", "answer": None}]).to_dict()["rewards"][0]
    assert found["unusable"] == {"null": 1}


def test_the_command(messy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["data", str(messy), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["train"][0]["rows"] == 7 and len(shown["train"][0]["refused"]) == 4
    good = tmp_path / "good.jsonl"
    good.write_text(MESSY[0])
    assert main(["data", str(good), "reward=exact_match"]) == 0
    assert "exact_match: answer: there" in capsys.readouterr().out
    assert main(["data", str(tmp_path / "none.jsonl")]) == 1
    assert "neither a file nor a folder" in capsys.readouterr().err
