"""Runs on data as people have it: published formats, several datasets, a curriculum, reasoning-gym, templates."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from hybrid_rl import preview
from hybrid_rl.data.prompts import PromptEncoder, PromptRow
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.run import generation
from hybrid_rl.run.evaluation import load_sets
from tests.support.agents.chat_forms import tool
from tests.support.tiny import CHAT_TEMPLATE, build_model, build_tokenizer, spread, sums

pytestmark = pytest.mark.slow  # the file as a whole

KEYS = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 2}


def drawn(trainer: Any, step: int) -> list[str]:
    lines = (trainer.run_folder / "samples.jsonl").read_text().splitlines()
    return [record["prompt"] for record in map(json.loads, lines) if record["step"] == step]


def test_several_datasets_with_weights_that_change(make_trainer: Any, records: Any, capsys: Any) -> None:
    data = {"few": sums(3), "many": [{"prompt": f"{n}=", "answer": "1"} for n in range(9)]}
    keys = {**KEYS, "max_steps": 4, "save_steps": 2, "run_name": "mixed", "dataset_weights": {"few": 1, "many": 3}}
    whole = make_trainer(train_dataset=data, reward_funcs=spread, **keys)
    first = whole.step().metrics
    assert first["data/few/share"] == 0.25 and first["data/many/share"] == 0.75
    assert first["data/few/reward"] * 0.25 + first["data/many/reward"] * 0.75 == pytest.approx(first["reward"])
    whole.train_dataset.weights = {"few": 1, "many": 1}
    second = whole.step().metrics
    assert second["data/few/share"] == 0.5 and whole.train_dataset.weights["few"] == 0.5
    assert "set after step 1: data.dataset_weights" in capsys.readouterr().err
    assert second["set/dataset_weights/few"] == 0.5 and "set/dataset_weights/few" not in first
    written = (whole.run_folder / "config.yaml").read_text()
    assert "# after step 1: data.dataset_weights" in written and whole.config.data.dataset_weights["many"] == 0.5
    whole.train_dataset.weights = {"few": 1, "many": 0}
    whole.save(whole.run_folder / "by-hand")  # what was set since the last step is kept
    folder = whole.run_folder / "by-hand"
    assert whole.step().metrics["data/few/share"] == 1.0
    resumed = make_trainer(
        str(folder), train_dataset=data, reward_funcs=spread, resume=str(folder), **{**keys, "run_name": "again"}
    )
    assert resumed.step().metrics["set/dataset_weights/few"] == 1
    assert resumed.config.data.dataset_weights == whole.config.data.dataset_weights == {"few": 1, "many": 0}
    assert drawn(resumed, 3) == drawn(whole, 3) != []
    with pytest.raises(ConfigError, match="leave out 'many'"):
        whole.train_dataset.weights = {"few": 1}
    with pytest.raises(ConfigError, match="set trainer.train_dataset.weights"):
        whole.dataset_weights = {"few": 1, "many": 1}


def test_a_curriculum_sees_rates_and_resumes(make_trainer: Any) -> None:
    def even(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        return [float(place % 2 and "1" in prompt) for place, prompt in enumerate(prompts)]

    keys = {**KEYS, "curriculum_floor": 0.05, "max_steps": 3, "score_by": "group"}
    whole = make_trainer(train_dataset=sums(12), reward_funcs=even, **keys)
    metrics = whole.step().metrics
    assert metrics["curriculum/measured"] == pytest.approx(4 / 12)
    assert 0 < metrics["curriculum/success_rate"] < 1
    saved = whole.save(whole.run_folder / "kept")
    whole.step()
    resumed = make_trainer(str(saved), train_dataset=sums(12), reward_funcs=even, resume=str(saved), **keys)
    resumed.step()
    assert drawn(resumed, 2) == drawn(whole, 2) != []


def test_reasoning_gym_by_name_scores_itself(make_trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    model = build_model(max_position_embeddings=128)
    trainer = make_trainer(model, None, "reasoning_gym:chain_sum?size=8&seed=1", tokenizer=build_tokenizer(), **KEYS)
    metrics = trainer.fit()
    assert "rewards/reasoning_gym_reward/mean" in metrics
    assert "8 problems of chain_sum (size=8, seed=1)" in capsys.readouterr().err
    assert "train_path: reasoning_gym:chain_sum?size=8&seed=1" in (trainer.run_folder / "config.yaml").read_text()


def test_system_prompt_and_template_reach_the_model_and_the_checkpoint(make_trainer: Any, tmp_path: Any) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(CHAT_TEMPLATE)
    tokenizer = build_tokenizer()
    data = {"train_path": str(tmp_path / "gsm.jsonl"), "chat_template_path": str(path), "system_prompt": "think"}
    (tmp_path / "gsm.jsonl").write_text('{"question": "1+1", "answer": "a #### 2"}\n' * 4)
    trainer = make_trainer(train_dataset=None, tokenizer=tokenizer, reward_funcs=spread, **KEYS, **data)
    batch = trainer.step().batch
    ids = batch["prompt_ids"].values[: batch["prompt_length"][0]].tolist()
    assert build_tokenizer().decode(ids).replace(" ", "") == "[sthink][u1+1]/"
    (sample, *_) = trainer.generate([[{"role": "user", "content": "1+1"}]], max_completion_length=1)
    assert sample.prompt[0] == {"role": "system", "content": "think"}
    saved = trainer.save(trainer.run_folder / "kept")
    assert AutoTokenizer.from_pretrained(saved).chat_template == CHAT_TEMPLATE and tokenizer.chat_template is None
    path.write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match="chat_template_path=.*line 1: .*endfor"):
        make_trainer(train_dataset=None, tokenizer=tokenizer, reward_funcs=spread, **KEYS, **data)


# Tools by name before the messages; "quick" ends a prompt if a row asks for it.
SHOWS_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name + '=' }}{% endfor %}"
    + CHAT_TEMPLATE
    + "{% if quick %}{{ 'quick' }}{% endif %}"
)


def test_every_row_is_shown_with_its_own_tools_and_keywords(
    make_trainer: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, evaluation, `generate` and the preview; the run says so at its start."""
    tokenizer = build_tokenizer(chat=True)
    tokenizer.chat_template = SHOWS_TOOLS
    rows = [
        {**row, "tools": schemas, "chat_template_kwargs": own}
        for row, schemas, own in zip(
            sums(4, chat=True),
            ([tool("add", a="integer")], json.dumps([tool("find", b="string")]), None, []),
            ({}, None, {"quick": True}, "{}"),
            strict=True,
        )
    ]
    questions = [row["prompt"][0]["content"] for row in rows]
    expected = [
        f"{before}[u{text}]/{after}"
        for text, before, after in zip(questions, ("add=", "find=", "", ""), ("", "", "quick", ""), strict=True)
    ]
    keys = {**KEYS, "prompts_per_step": 4, "shuffle": False}
    trainer = make_trainer(train_dataset=rows, eval_dataset=rows, tokenizer=tokenizer, reward_funcs=spread, **keys)
    note = "the chat template gets `tools` and `chat_template_kwargs` of each row"
    assert note in " ".join(capsys.readouterr().err.split())
    batch = trainer.step().batch
    prompts = [tokenizer.decode(ids.tolist()) for ids in batch["prompt_ids"]]
    assert list(dict.fromkeys(prompts)) == expected
    with monkeypatch.context() as patched:
        rows_of_calls: list[PromptRow] = []
        patched.setattr(
            generation, "PromptRow", lambda *fields: rows_of_calls.append(PromptRow(*fields)) or rows_of_calls[-1]
        )
        trainer.generate(rows, max_completion_length=1)
    assert [tokenizer.decode(row.prompt_ids) for row in rows_of_calls] == expected
    (held_out,) = load_sets(rows, PromptEncoder(tokenizer, max_prompt_length=None)).values()
    assert [tokenizer.decode(held_out[place].prompt_ids) for place in range(4)] == expected
    (found,) = preview(rows, tokenizer=tokenizer, num_shown=4).train
    assert [one.text for one in found.shown] == expected and found.note == note


def test_images_are_refused_by_the_preview_as_by_a_run(make_trainer: Any) -> None:
    rows = [{**row, "images": ["cat.png"]} for row in sums(2)]
    with pytest.raises(DataError, match="row 0 has something in the column 'images'. Images, audio and video cannot"):
        make_trainer(train_dataset=rows, reward_funcs=spread, **KEYS)
    for tokenizer in (None, build_tokenizer()):
        found = preview(rows, tokenizer=tokenizer)
        assert not found.would_start and "column 'images'" in str(found.train[0].refused[0])
