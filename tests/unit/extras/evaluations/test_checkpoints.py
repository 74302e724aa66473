"""Checkpoints and models evaluated without a Trainer, and from the command line."""

import json

import pytest

from hybrid_rl.cli.app import main
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.extras.evaluations import checkpoints
from hybrid_rl.extras.evaluations.checkpoints import evaluate_checkpoint
from hybrid_rl.extras.evaluations.evaluations import Evaluation
from hybrid_rl.rewards import exact_match
from tests.support.inside.workers import optimizer_of
from tests.support.tiny import sums


def odd(completion_ids, log_extra=None, **_):
    log_extra("extracted_answer", [str(ids[0]) for ids in completion_ids])
    return [float(ids[0] % 2) for ids in completion_ids]


REWARD = """
def odd(completion_ids, **_):
    return [float(ids[0] % 2) for ids in completion_ids]

def shape(completion_ids, **_):
    return [len(ids) / 7 for ids in completion_ids]
"""


def test_a_checkpoint_gives_what_its_trainer_gave(make_trainer, tmp_path, monkeypatch):
    """Greedily; with the limit of tokens that it was trained with, no optimizer, and nothing changed in its folder."""
    started = []
    start = checkpoints.start_workers

    def noted(run, *arguments, **options):
        policy, generating = start(run, *arguments, **options)
        started.append(optimizer_of(policy).num_bytes)
        return policy, generating

    monkeypatch.setattr(checkpoints, "start_workers", noted)
    trainer = make_trainer(reward_funcs=odd, eval_dataset=sums(6), save_steps=1)
    metrics = trainer.fit()
    checkpoint = trainer.run_folder / "checkpoint-2"
    before = {file: file.stat().st_mtime_ns for file in checkpoint.rglob("*")}
    found = evaluate_checkpoint(checkpoint, sums(6), odd, folder=tmp_path / "out")
    assert found.step == 2 and found.settings["max_completion_length"] == 5
    assert found.sets == dict(trainer.evaluations)
    same = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    assert {name: found.metrics[name] for name in same} == same
    assert before == {file: file.stat().st_mtime_ns for file in checkpoint.rglob("*")}
    assert started == [0] and optimizer_of(trainer).num_bytes > 0
    assert len((tmp_path / "out" / "eval-samples.jsonl").read_text().splitlines()) == 6
    assert Evaluation.read(tmp_path / "out") == found
    shorter = evaluate_checkpoint(checkpoint, sums(6), odd, folder=tmp_path / "short", max_completion_length=3)
    assert shorter.settings["max_completion_length"] == 3


def test_what_cannot_be_evaluated_is_refused(model_folder, tmp_path):
    for data, keys, message in [
        (sums(1), {"max_steps": 3}, "max_steps cannot be set: an evaluation has no training steps"),
        (None, {}, "no data to evaluate on"),
        (sums(1), {"folder": model_folder}, "exists; an evaluation is written to a new folder"),
        (sums(1), {"num_generations_eval": 4}, "set eval_temperature above 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            evaluate_checkpoint(model_folder, data, exact_match, **{"output_dir": str(tmp_path / "runs"), **keys})
    with pytest.raises(ConfigError, match="no data to evaluate on"):
        evaluate_checkpoint(model_folder, {}, exact_match)
    with pytest.raises(DataError, match="empty"):
        evaluate_checkpoint(model_folder, [], exact_match, max_completion_length=5)
    assert not (tmp_path / "runs").exists()


def test_the_command_evaluates_and_compares(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(REWARD)
    for name, count in (("a", 9), ("b", 4)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(count)))
    common = ["max_completion_length=20", "eval_temperature=1", "num_generations_eval=2"]
    assert main(["eval", str(model_folder), "a.jsonl", "b.jsonl", "reward=odd.py:odd", *common, "--out", "one"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split("  ") for line in shown.splitlines()]
    assert [row[0] for row in rows if row[0] in "ab" and row[0]] == ["a"] * 3 + ["b"] * 3
    value = Evaluation.read(tmp_path / "one").estimates()["b"]["pass@2"].value
    assert f"{100 * value:.1f} %" in next(line for line in shown.splitlines() if line.startswith("b    pass@2"))
    assert "samples and numbers: one" in shown
    kept = json.loads((tmp_path / "one" / "eval.json").read_text())
    kept["settings"]["seed"] = 7
    kept["samples"]["a"]["right"] = [[1, 1]] * 9
    (tmp_path / "two.json").write_text(json.dumps(kept))
    monkeypatch.setattr(checkpoints, "start_workers", None)  # nothing is generated from here on
    assert main(["eval", "two.json", "--against", "one"]) == 0
    shown = capsys.readouterr().out
    assert "Not only the models differ: seed was 42 and is 7." in shown
    assert "\na: " in shown and "\nb: This may be noise" in shown and "is better than" in shown
    assert main(["eval", "two.json", "--against", "one", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["comparison"]["b"]["is_noise"] and not numbers["comparison"]["a"]["is_noise"]
    assert "samples" not in numbers and "samples" not in numbers["against"]


def test_the_command_refuses_in_words(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(REWARD)
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        (folder / "a.jsonl").write_text(json.dumps(sums(1)[0]) + "\n")
    for words, message in [
        (["a.jsonl"], "reward=FILE.py:FUNCTION is missing"),
        (["reward=odd.py:odd"], "the data is missing"),
        (["a.jsonl", "other/a.jsonl", "reward=odd.py:odd"], "have names in common"),
        (["nothing.jsonl", "reward=odd.py:odd"], "nothing.jsonl"),
        (["a.jsonl", "reward=odd.py:odd", "max_step=3"], "unknown key 'max_step'"),
    ]:
        assert main(["eval", str(model_folder), *words, "max_completion_length=5"]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "eval.json").write_text("{}")
    assert main(["eval", "eval.json"]) == 1
    assert "is not an evaluation: KeyError" in capsys.readouterr().err
    assert main(["eval", str(model_folder), "a.jsonl", "reward=odd.py:shape", "max_completion_length=5"]) == 0
    assert "rewards other than 0 and 1, or none: set success_reward" in capsys.readouterr().out
