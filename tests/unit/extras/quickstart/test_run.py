"""What the quickstart trains on, and where a teacher comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hybrid_rl.config import load_config, resolve
from hybrid_rl.extras.quickstart import run as module
from hybrid_rl.extras.quickstart.command import SETTINGS
from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer
from hybrid_rl.extras.quickstart.run import improve, settings_of, teacher, training_rows
from hybrid_rl.extras.quickstart.task import Task, build_task


@pytest.fixture(scope="module")
def task() -> Task:
    return build_task(0, num_train=256, num_heldout=20)


TOKENIZER = build_tokenizer()


def test_problems_come_with_right_answers_for_algorithms_that_learn_from_them(task: Task) -> None:
    assert training_rows(task, load_config({"algorithm": "grpo"})[0]) is task.train
    rows = training_rows(task, load_config({"algorithm": "sft"})[0])
    assert [row["completion"] for row in rows] == [row["answer"] for row in task.train]


def test_a_teacher_is_made_where_one_is_wanted_and_goes_again(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEACHER_STEPS", 1)
    model = build_model(TOKENIZER, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with teacher(model, TOKENIZER, task, load_config({"algorithm": "distillation"})[0]) as config:
        folder = config.advantage.teacher_path  # type: ignore[attr-defined]
        taught = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert any(not taught[name].equal(tensor) for name, tensor in before.items())
    assert not Path(folder).exists()
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_no_teacher_where_none_is_wanted_or_one_is_named(task: Task) -> None:
    for given in ({"algorithm": "grpo"}, {"algorithm": "distillation", "teacher_path": "there"}):
        config = load_config(given)[0]
        with teacher(build_model(TOKENIZER, 0), TOKENIZER, task, config) as settings:
            assert settings is config


def test_improve_reports_the_curve(task: Task, tmp_path: Path) -> None:
    changes = {"max_steps": 2, "eval_steps": 1, "prompts_per_step": 4, "num_generations": 2, "max_completion_length": 6}
    config, _ = load_config({"algorithm": "grpo", "output_dir": str(tmp_path), **changes})
    outcome = improve(build_model(TOKENIZER, 0), TOKENIZER, task, config)
    assert sorted(outcome.curve) == [0, 1, 2]
    assert outcome.accuracy == outcome.curve[2]
    assert outcome.steps == 2 and outcome.run.parent == tmp_path


def test_a_run_of_a_few_steps_has_a_shorter_warm_up_unless_one_is_given() -> None:
    for arguments, expected in (([], 10), (["max_steps=5"], 0), (["max_steps=11"], 10), (["max_steps=10"], 1)):
        assert settings_of(SETTINGS, arguments)[0].optimizer.warmup_steps == expected
    assert settings_of(SETTINGS, ["max_steps=5", "warmup_steps=7"])[0].optimizer.warmup_steps == 7


def test_demonstrations_draw_no_other_groups() -> None:
    for name, expected in (("maxrl", 40), ("sft", 0)):
        config, given = settings_of(SETTINGS.with_name("smollm2.yaml"), [f"algorithm={name}"])
        assert resolve(config, given).algorithm.max_refills == expected
