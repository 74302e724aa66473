"""`hybrid-rl generate`: prompts, checkpoints and the chat."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybrid_rl.cli import main
from hybrid_rl.cli.generate import Chat, as_prompt, checkpoint_of, length_of, prompts_of, rows_of, taken
from hybrid_rl.config import load_config
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.rollout.generations import Generation
from tests.support.tiny import build_model, build_tokenizer


def test_prompts_are_texts_lines_and_rows(tmp_path: Path) -> None:
    assert prompts_of([], None) is None
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert prompts_of(["zero"], tmp_path / "a.txt") == ["zero", "one", "two"]
    said = [{"role": "user", "content": "hi"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": said, "answer": "1"}) + "\n")
    assert prompts_of([], tmp_path / "a.jsonl") == [said]
    (tmp_path / "b.jsonl").write_text('{"question": "hi"}\n')
    (tmp_path / "empty").write_text("\n")
    for name, message in (("b.jsonl", "a column prompt"), ("no", "cannot be read"), ("empty", "is empty")):
        with pytest.raises(DataError, match=message):
            prompts_of([], tmp_path / name)


def test_a_text_becomes_a_conversation_unless_it_is_raw() -> None:
    user = {"role": "user", "content": "hi"}
    assert as_prompt("hi", None, raw=True) == "hi"
    assert as_prompt("hi", "be nice", raw=False) == [{"role": "system", "content": "be nice"}, user]
    assert as_prompt([user], "be nice", raw=False) == [user]


def test_of_a_run_the_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint; save_steps=N"):
        checkpoint_of(str(tmp_path))
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
    assert checkpoint_of(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert checkpoint_of(str(tmp_path / "checkpoint-9")) == str(tmp_path / "checkpoint-9")
    assert checkpoint_of("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    (tmp_path / "checkpoint-9" / "config.json").rename(tmp_path / "checkpoint-9" / "adapter_config.json")
    assert checkpoint_of(str(tmp_path / "checkpoint-9")) == str(tmp_path / "checkpoint-9")


@pytest.mark.parametrize("word", ["3+3=", "Count to 7", "What is x=1?"])
def test_a_prompt_among_the_settings_is_told_of(word: str) -> None:
    with pytest.raises(ConfigError, match="a prompt is given as --prompt"):
        taken([word], {})


def test_options_may_be_written_like_keys() -> None:
    sampling = {"temperature": 1.0, "max_completion_length": 512}
    assert taken(["temperature=0", "device=cpu", "max_completion_length=9"], sampling) == ["device=cpu"]
    assert sampling == {"temperature": 0.0, "max_completion_length": 9}
    with pytest.raises(ConfigError, match="'hot' is not of type float"):
        taken(["temperature=hot"], sampling)


def test_a_checkpoint_brings_the_length_of_its_run(tmp_path: Path) -> None:
    assert length_of(str(tmp_path)) == length_of("Qwen/Qwen2.5-0.5B") == 512
    state = {"global_step": 3, "config": {"rollout": {"max_completion_length": 12}}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert length_of(str(tmp_path)) == 12


def test_vllm_is_built_for_the_prompts_that_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def refuse(train_dataset: Any, **_: Any) -> None:
        seen.append(train_dataset)
        raise ConfigError("enough")

    monkeypatch.setattr("hybrid_rl.Trainer", refuse)
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    words = ["generate", str(tmp_path), "--prompt", "Count to 7:", "--prompt", "3"]
    for more in (["engine=vllm", "--raw"], ["engine=vllm"], ["engine=vllm", "chat_template_path=t"], []):
        (tmp_path / "t").write_text("chat")
        monkeypatch.chdir(tmp_path)
        assert main([*words, *more]) == 1
    texts = [{"prompt": "Count to 7:"}, {"prompt": "3"}]
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in texts]
    assert seen == [texts, texts, chats, [{"prompt": "-"}]]
    stream = rows_of(load_config({"engine": "vllm"})[0], None, None, raw=False)  # a chat
    assert list(stream()) == list(stream()) == [{"prompt": "-"}]


class Echo:
    """Answers with the number of messages, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def generate(self, prompts: list[Any], **sampling: Any) -> list[Generation]:
        self.asked.append((prompts[0], sampling))
        return [Generation(prompts[0], f"answer {len(prompts[0])}", [1], [0.0], "stop")]


def test_a_chat_remembers_what_was_said() -> None:
    echo, out = Echo(), io.StringIO()
    chat = Chat(echo, {"temperature": 1.0, "seed": 0}, console=Console(file=out))  # type: ignore[arg-type]
    for line in ("hi", "more", "/again", "/set temperature 0.5", "/system be nice", "last", "/reset", "new"):
        chat.take(line)
    user = [{"role": "user", "content": text} for text in ("hi", "more", "last", "new")]
    first, second = ({"role": "assistant", "content": f"answer {count}"} for count in (1, 3))
    system = {"role": "system", "content": "be nice"}
    assert [asked for asked, _ in echo.asked] == [
        [user[0]],
        [user[0], first, user[1]],
        [user[0], first, user[1]],
        [system, user[0], first, user[1], second, user[2]],
        [system, user[3]],
    ]
    assert [sampling["seed"] for _, sampling in echo.asked] == [0, 0, 1, 1, 1]
    assert [sampling["temperature"] for _, sampling in echo.asked] == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert "answer 6" in out.getvalue()


def test_a_chat_says_what_it_does_not_know() -> None:
    echo, out = Echo(), io.StringIO()
    chat = Chat(echo, {"temperature": 1.0}, console=Console(file=out, width=200))  # type: ignore[arg-type]
    for line in ("/nope", "/set heat 1", "/set temperature hot", "/again", "/help"):
        chat.take(line)
    for said in ("/nope is no command", "there is no 'heat' to set", "could not convert", "nothing was said", "/quit"):
        assert said in out.getvalue()
    assert echo.asked == []


@pytest.mark.slow
def test_a_model_completes_prompts_and_leaves_no_run_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build_model(0).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), "device=cpu", "--max-completion-length", "4", "--json"]
    assert main([*words, "--prompt", "1+2=", "--prompt", "3+4=", "--num-generations", "2"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["1+2=", "1+2=", "3+4=", "3+4="]
    assert all(row["num_tokens"] <= 4 and row["finish_reason"] in ("stop", "length") for row in rows)
    assert "no chat template" in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert main([*words, "--prompt", "1+2=", "--system", "x"]) == 1
    assert "--system needs a chat template" in capsys.readouterr().err
