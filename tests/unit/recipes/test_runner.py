"""Recipes: thin scripts whose settings load, on the quickstart or on a user's own model and data."""

from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Module

from hybrid_rl.config import load_config, num_training_steps, resolve
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.quickstart import command
from hybrid_rl.extras.quickstart.command import SETTINGS, row_name, warming
from hybrid_rl.extras.quickstart.run import Outcome
from hybrid_rl.extras.quickstart.task import build_task
from hybrid_rl.extras.quickstart.warm_start import SupervisedReport
from recipes.record_curves import names, settings_digest, settings_file
from recipes.runner import main
from tests.support.tiny import build_model, build_tokenizer

RECIPES = names()
NUM_TRAIN = 4000  # problems of the quickstart


@pytest.mark.parametrize("name", RECIPES)
def test_settings_are_of_the_algorithm_and_leave_the_quickstart_something_to_do(name: str) -> None:
    config, given = load_config(settings_file(name))
    resolved = resolve(config, given)
    assert config.algorithm.name == {"lora": "grpo"}.get(name, name)
    assert config.run_name == f"{name}-quickstart"
    assert num_training_steps(resolved, NUM_TRAIN) * config.data.prompts_per_step <= 2 * NUM_TRAIN
    assert config.rollout.max_completion_length == 6


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_docstring_and_one_call(name: str) -> None:
    tree = ast.parse(settings_file(name).with_suffix(".py").read_text())
    doc = ast.get_docstring(tree)
    assert doc is not None and f"recipes/{name}.py" in doc
    assert len(tree.body) <= 6


def test_settings_have_a_digest_of_what_they_say() -> None:
    digests = {settings_digest(name) for name in RECIPES}
    assert len(digests) == len(RECIPES)
    assert all(len(digest) == 16 for digest in digests)


def test_help_shows_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"], settings_file("gspo"), "GSPO: the docstring")
    assert "GSPO: the docstring" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gspo", ["attention=varlen"], "model.attention=varlen cannot run here: it needs a CUDA device"),
        ("gspo", ["memory.offload=[optimizer,actor]"], "memory.offload names actor, but"),
        pytest.param("gspo", ["device_memory=1MB"], "which has 1.00 MB", marks=pytest.mark.slow),
        ("distillation", ["memory.offload=[critic]"], "this run has no critic"),  # its teacher is not there yet either
    ],
)
def test_the_quickstart_refuses_before_its_warm_start_what_cannot_run(
    name: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def warm_started(*_: object) -> None:
        raise AssertionError("the warm start began")

    monkeypatch.setattr(command, "warm_started", warm_started)
    with pytest.raises(ConfigError, match=message):
        main([*arguments, "device=cpu", f"output_dir={tmp_path / 'runs'}"], settings_file(name), "")
    assert not (tmp_path / "runs").exists()


def test_the_quickstart_checks_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """What the Trainer will say is not said twice."""

    def warm_started(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "warm_started", warm_started)
    with pytest.raises(KeyboardInterrupt):
        main(["device=cpu", "resume=auto", f"output_dir={tmp_path}"], settings_file("gspo"), "")
    assert "resume=auto" not in caplog.text
    logging.getLogger("hybrid_rl").warning("heard again")
    assert "heard again" in caplog.text


@pytest.mark.slow
def test_a_resumed_quickstart_begins_with_the_warm_start_that_it_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with a second one, nor with bare weights: the reference model is a copy of it."""
    begun, warmed, original = [], [], command.improve

    def warm_start(model: Module, *_: object, **__: object) -> SupervisedReport:
        warmed.append(model)
        with torch.no_grad():
            model.get_parameter("lm_head.weight").add_(len(warmed))
        return SupervisedReport(0.375, 700, 9.0)

    def improve(model: Module, *rest: Any) -> Outcome:
        begun.append(model.get_parameter("lm_head.weight").detach().clone())
        return original(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "build_task", lambda seed: build_task(seed, num_train=64, num_heldout=4))
    monkeypatch.setattr(command, "warm_start", warm_start)
    monkeypatch.setattr(command, "improve", improve)
    small = ["prompts_per_step=2", "num_generations=2", "warmup_steps=0", "save_steps=1", "eval_steps=null"]
    where = ["device=cpu", f"output_dir={tmp_path}", "run_name=own", "resume=auto"]
    for steps in (1, 2, 2):  # the third run has nothing left to do
        main([*small, *where, f"max_steps={steps}"], settings_file("grpo"), "", compares=steps == 2)
        rows = json.loads((tmp_path / "own" / "comparison.json").read_text())
        assert [row["steps"] for row in rows] == [700, steps] and rows[0]["accuracy"] == 0.375
    assert len(warmed) == 1
    assert begun[0].equal(begun[1]) and begun[0].equal(begun[2])
    assert capsys.readouterr().out.count("that of the run that is resumed") == 2


def test_a_warm_start_that_is_interrupted_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), warming(200) as show:
        show(100, 0.25)
        raise KeyboardInterrupt
    said = capsys.readouterr().out
    assert "200 steps" in said and re.search(r"step 100 of 200, loss 0.250, about \d+ s left", said)
    assert "interrupted in the supervised warm start" in said


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("reward=my.py:score", r"set model\.path too"),
        ("data.train_path=train.jsonl", r"set model\.path too"),
        ("model.path=somewhere", "reward=FILE.py:FUNCTION is missing"),
    ],
)
def test_your_own_model_data_and_reward_go_together(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main([argument], settings_file("gspo"), "")


def test_the_quickstart_of_the_package_has_the_settings_of_the_recipe() -> None:
    assert SETTINGS.read_text() == settings_file("grpo").read_text()


def test_rows_are_named_after_the_algorithm() -> None:
    assert row_name(load_config(settings_file("grpo"))[0]) == "then GRPO, from right or wrong only"
    assert row_name(load_config(settings_file("gspo"))[0]) == "then Group Sequence Policy Optimization"


def test_a_model_of_your_own_is_trained_with_the_recipes_algorithm(tmp_path: Path) -> None:
    """From the library's defaults: nothing of the quickstart's settings."""
    build_model(0).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    (tmp_path / "score.py").write_text(
        "def score(completion_ids, **_):\n    return [float(i[0] % 2) for i in completion_ids]\n"
    )
    own = [f"model.path={tmp_path / 'model'}", f"data.train_path={tmp_path / 'train.jsonl'}"]
    own += [f"reward={tmp_path / 'score.py'}:score", f"output_dir={tmp_path / 'runs'}", "run_name=own"]
    main([*own, "max_steps=1", "prompts_per_step=2", "max_completion_length=4"], settings_file("cispo"), "")
    saved, _ = load_config(tmp_path / "runs" / "own" / "config.yaml")
    assert saved.algorithm.name == saved.policy_loss.objective == "cispo"  # type: ignore[attr-defined]
    assert (saved.optimizer.learning_rate, saved.algorithm.num_generations) == (1e-6, 8)


def test_a_config_file_names_the_algorithm_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.yaml").write_text("algorithm: sapo\nmodel:\n  path: somewhere\n")
    seen: list[Any] = []
    monkeypatch.setattr("recipes.runner.train_own", lambda config, rewards: seen.append(config))
    main([f"config={tmp_path / 'own.yaml'}", "reward=score.py:score"], settings_file("gspo"), "")
    assert seen[0].algorithm.name == "sapo"


def test_the_recipe_of_adapters_trains_adapters_of_an_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("recipes.runner.train_own", lambda config, rewards: seen.append(config))
    for arguments in ([], ["lora.r=2"], ["r=3", "algorithm=gspo"]):
        main(["model.path=somewhere", *arguments], settings_file("lora"), "")
    main(["model.path=somewhere"], settings_file("grpo"), "")
    assert [config.lora.r for config in seen] == [8, 2, 3, None]
    assert [config.algorithm.name for config in seen] == ["grpo", "grpo", "gspo", "grpo"]
