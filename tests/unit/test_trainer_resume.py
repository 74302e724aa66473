"""A run that was broken off and resumed is, bit for bit, the run that went straight through."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.errors import CheckpointError, ConfigError, DataError
from tests.support.inside.trainers import evaluator_of
from tests.support.optimizer_state import same_optimizer
from tests.support.tiny import build_model, sums

pytestmark = pytest.mark.slow  # the file as a whole


def weights_of(folder: Path) -> dict[str, bytes]:
    """All weights below a checkpoint, by file."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("model*.safetensors")}


RESUMED: dict[str, dict[str, Any]] = {
    "iterations": {"num_iterations": 2, "prompts_per_mini_batch": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "epoch boundary": {"max_steps": None, "num_train_epochs": 2.0},
    "bfloat16": {"dtype": "bfloat16"},
    "stream": {"train_dataset": lambda: iter(sums(10))},
    "eval": {"shuffle": False, "train_dataset": sums(5), "eval_dataset": sums(2), "eval_steps": 2},
    "critic": {"algorithm": "ppo", "critic_warmup_steps": 2, "critic_learning_rate": 1e-2},
    "vtrace": {"advantage": "vtrace", "prompts_per_mini_batch": 2},
    "learned numbers": {
        "policy_loss": "lambda_grpo",
        "prompts_per_mini_batch": 2,
        "loss_options": {"lambda_learning_rate": 0.1},
    },
    "reference": {"beta": 0.1},
    "adaptive kl": {"beta": 0.5, "kl_target": 0.01, "kl_horizon": 20, "learning_rate": 3e-2},
    "moving reference": {"beta": 0.5, "reference_reset_steps": 2, "learning_rate": 3e-2},
    "reference that follows": {"beta": 0.5, "ref_model_sync_steps": 2, "learning_rate": 3e-2},
    "adaptive entropy": {"entropy_target": 1.0, "entropy_coef_delta": 0.1, "learning_rate": 3e-2},
    "refills": {"max_refills": 4},
    "greedy baseline": {"advantage": "remax"},
}


@pytest.mark.parametrize(
    ("name", "broken_at"),
    [
        *(pytest.param(name, 3, marks=[pytest.mark.sweep] * (name == "vtrace")) for name in RESUMED),  # as the critic
        *(pytest.param(name, 1, marks=pytest.mark.sweep) for name in RESUMED),
    ],
)
def test_resume_is_bit_exact(make_trainer, tmp_path, records, name: str, broken_at: int) -> None:
    """12 prompts in steps of 4: step 3 ends an epoch. Every run starts from the same weights on disk."""
    keys = {"save_steps": broken_at, "run_name": "run", "max_steps": 6} | RESUMED[name]
    dtype = getattr(torch, keys.get("dtype", "float32"))
    straight = make_trainer(build_model(dtype=dtype), **keys, output_dir=str(tmp_path / "straight"))
    for _ in range(broken_at):
        straight.step()
    broken = shutil.copytree(straight.run_folder, tmp_path / "broken" / "run", ignore=shutil.ignore_patterns(".lock"))
    straight.fit()
    # What came after the last checkpoint is lost with the process, except for its records.
    with (broken / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": broken_at + 1, "reward": -1.0}) + "\n")
    resumed = make_trainer(build_model(dtype=dtype), **keys, output_dir=str(tmp_path / "broken"), resume="auto")
    assert resumed.global_step == broken_at
    assert resumed.run_folder == broken
    resumed.fit()
    mine, expected = (records(one, comparable=True) for one in (resumed, straight))
    assert [line["step"] for line in mine if line["step"]] == list(range(1, 7))
    assert mine[-6:] == expected[-6:]
    first, second = (records(one, name="samples.jsonl") for one in (resumed, straight))
    assert first == second
    ends = [one.run_folder / "checkpoint-6" for one in (resumed, straight)]
    assert weights_of(ends[0]) == weights_of(ends[1])
    assert ("critic/model.safetensors" in weights_of(ends[0])) == (name in ("critic", "vtrace"))
    assert same_optimizer(*ends)


def test_resume_from_a_folder_elsewhere_begins_a_run_folder(make_trainer, tmp_path, records) -> None:
    first = make_trainer(max_steps=2, run_name="first")
    first.fit()
    copied = shutil.copytree(first.save(), tmp_path / "kept")
    second = make_trainer(max_steps=4, run_name="second", resume=str(copied))
    second.fit()
    assert second.run_folder.name == "second"
    assert [line["step"] for line in records(second)] == [3, 4]
    assert second.num_tokens > first.num_tokens


def test_auto_without_a_checkpoint_starts_from_the_beginning(make_trainer, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        trainer = make_trainer(run_name="run", resume="auto")
    assert trainer.global_step == 0
    assert "has no checkpoint yet" in caplog.text and "save_steps is not set" in caplog.text
    caplog.clear()
    make_trainer(run_name="other", resume="auto", save_steps=1)
    assert "save_steps is not set" not in caplog.text


def test_damage_is_told_by_the_file_before_anything_is_loaded(make_trainer, monkeypatch) -> None:
    """A flipped bit would be read without a word, and a text that is cut short is a riddle of the library that reads
    it: the tokenizer is read before the weights are."""
    first = make_trainer(run_name="run", max_steps=4)
    first.step()
    folder = first.save()
    first.close()
    monkeypatch.setattr("hybrid_rl.run.crew.start_workers", lambda *_: pytest.fail("the weights are loaded"))
    for name in ("tokenizer.json", "model.safetensors", "optimizer/shard-00001-model-00001-of-00001.safetensors"):
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-5] if name == "tokenizer.json" else whole[:-3] + bytes([whole[-3] ^ 64]) + whole[-2:])
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            make_trainer(run_name="run", max_steps=4, resume=str(folder))
        if "optimizer" not in name:
            with pytest.raises(CheckpointError, match=f"{path} is damaged"):
                make_trainer(str(folder), max_steps=4)
        path.write_bytes(whole)


def test_auto_goes_on_before_a_damaged_checkpoint(make_trainer, records, caplog) -> None:
    """The later records are made again, and nothing is deleted."""
    keys = {"run_name": "run", "save_steps": 2, "max_steps": 4}
    first = make_trainer(**keys)
    first.fit()
    first.close()
    damaged = first.run_folder / "checkpoint-4" / "model.safetensors"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    resumed = make_trainer(**keys, resume="auto")
    assert resumed.global_step == 2 and damaged.exists()
    assert (
        "going on from" in caplog.text and f"{damaged} is damaged: its content is not what was written" in caplog.text
    )
    resumed.fit()
    assert [line["step"] for line in records(resumed) if line["step"]] == [1, 2, 3, 4]
    assert [line["step"] for line in records(resumed, name="metrics.jsonl.dropped")] == [3, 4]
    kept = resumed.run_folder / "checkpoint-4.abandoned" / "model.safetensors"
    assert kept.read_bytes()[-1] == data[-1] ^ 1 and weights_of(resumed.run_folder / "checkpoint-4") == {
        "model.safetensors": data
    }
    with pytest.raises(CheckpointError, match="is damaged"):
        make_trainer(**keys, resume=str(kept.parent))


def test_auto_again_and_again(make_trainer, records) -> None:
    """A job that is always started with the same line, and dies: before its first checkpoint, then after it."""
    keys = {"run_name": "run", "resume": "auto", "save_steps": 2, "max_steps": 6}
    steps = []
    for num_steps in (1, 3, 2, 2):
        trainer = make_trainer(**keys)
        steps.append(trainer.global_step)
        for _ in range(num_steps):
            trainer.step()
        trainer.close()
    assert steps == [0, 0, 2, 4]
    assert [line["step"] for line in records(trainer)] == [1, 2, 3, 4, 5, 6]
    assert trainer.run_folder.name == "run"


def test_who_goes_back_to_an_older_checkpoint_leaves_the_later_ones(make_trainer, records, capsys) -> None:
    """Afterwards "auto" goes on with the new branch, though it has fewer steps; the old one can still be named."""
    keys = {"run_name": "run", "save_steps": 1}
    first = make_trainer(max_steps=4, **keys)
    first.fit()
    first.close()
    folder, old = first.run_folder, weights_of(first.run_folder / "checkpoint-4")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    older = {"resume": str(folder / "checkpoint-1"), "max_steps": 3}
    make_trainer(**keys, **older).close()
    assert {path: path.read_bytes() for path in before} == before and not list(folder.glob("*.dropped"))
    capsys.readouterr()
    second = make_trainer(**keys, **older, learning_rate=5e-2)
    second.fit()
    second.close()
    said = capsys.readouterr().err
    assert f"resuming {folder / 'checkpoint-1'} (step 1)\n" in said
    assert "changed: max_steps 4 -> 3, optimizer.learning_rate 0.01 -> 0.05\n" in said
    assert [line["step"] for line in records(second)] == [0, 1, 2, 3]
    assert [line["step"] for line in records(second, name="samples.jsonl")] == sorted(8 * [1, 2, 3])
    assert [line["step"] for line in records(second, name="metrics.jsonl.dropped")] == [2, 3, 4]
    third = make_trainer(**keys, resume="auto", max_steps=5)
    assert third.global_step == 3
    assert torch.equal(third.module.lm_head.weight, second.module.lm_head.weight)
    third.close()
    fourth = make_trainer(**keys, resume=str(folder / "checkpoint-4.abandoned"), max_steps=5)
    assert fourth.global_step == 4 and weights_of(folder / "checkpoint-4.abandoned") == old
    there = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    fourth.fit()
    fourth.close()
    assert fourth.run_folder == folder.with_name(f"{folder.name}-2")  # the branch that went on is not mixed with it
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == there
    assert [line["step"] for line in records(fourth)] == [5]


def test_resuming_a_finished_run_does_nothing(make_trainer, records, capsys) -> None:
    keys = {"run_name": "run", "save_steps": 2, "max_steps": 2}
    first = make_trainer(**keys)
    first.fit()
    before = records(first)
    again = make_trainer(resume="auto", **keys | {"max_steps": 1})
    capsys.readouterr()
    assert again.fit() == {}
    assert capsys.readouterr().err.startswith("nothing to do: step 2, max_steps=1; trainer.fit(steps=20) trains")
    assert records(first) == before


def test_other_data_or_seed_is_refused(make_trainer) -> None:
    keys = {"run_name": "run", "max_steps": 4}
    first = make_trainer(**keys)
    first.step()
    first.save()
    for changed in ({"seed": 7}, {"train_dataset": sums(11)}, {"shuffle": False}):
        with pytest.raises(DataError, match="other data or settings"):
            make_trainer(resume="auto", **keys | changed)


def test_entries_that_cannot_be_are_told_with_the_name_of_the_file(make_trainer) -> None:
    """In a checkpoint whose manifest was deleted, which nothing can be compared with."""
    keys = {"run_name": "run", "max_steps": 4, "beta": 0.1, "kl_target": 0.1}
    first = make_trainer(**keys)
    first.step()
    folder = first.save()
    first.close()
    (folder / "manifest.json").unlink()
    changes = [{"schedule": None}, {"schedule": {}}, {"schedule": {"last_epoch": "x"}}, {"algorithm": 3}]
    changes = [("optimizer/scalars.json", change) for change in changes]
    for file, change in [*changes, ("trainer_state.json", {"sampler": {"version": {}}})]:
        whole = (folder / file).read_text()
        entries = json.loads(whole) | change
        (folder / file).write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))
        with pytest.raises((CheckpointError, DataError)) as caught:
            make_trainer(**keys, resume=str(folder))
        assert str(folder / file) in str(caught.value)
        (folder / file).write_text(whole)


def test_a_run_that_lost_its_config_goes_on_in_its_folder(make_trainer, records) -> None:
    """The config of the running run is written again; that of one that has ended is not needed to go on."""
    keys = {"run_name": "run", "save_steps": 1, "max_steps": 4}
    first = make_trainer(**keys)
    first.step()
    (first.run_folder / "config.yaml").unlink()
    first.step()
    assert (first.run_folder / "config.yaml").is_file()
    (first.run_folder / "config.yaml").unlink()
    first.close()
    second = make_trainer(**keys, resume="auto")
    assert (second.global_step, second.run_folder) == (2, first.run_folder)
    second.step()
    second.close()
    shutil.rmtree(second.run_folder)
    third = make_trainer(**keys, resume="auto")
    third.step()
    shutil.rmtree(third.run_folder)
    third.step()
    assert [line["step"] for line in records(third)] == [2] and (third.run_folder / "checkpoint-2").is_dir()
    third.close()
    assert make_trainer(**keys, resume="auto").global_step == 2


def test_a_run_that_another_process_has_is_refused_before_anything_is_read(make_trainer, tmp_path) -> None:
    code = "import sys, time; from pathlib import Path; from hybrid_rl.checkpoint.owners import FolderLock; "
    code += "lock = FolderLock(Path(sys.argv[1])); print(flush=True); time.sleep(3600)"
    first = make_trainer(run_name="run", save_steps=1, max_steps=3)
    first.step()
    first.close()
    command = [sys.executable, "-c", code, str(first.run_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            for resume in ("auto", str(first.run_folder / "checkpoint-1")):
                with pytest.raises(ConfigError, match=f"is in use by process {other.pid}"):
                    make_trainer(train_dataset=3, run_name="run", max_steps=3, resume=resume)
            before = records_of(first.run_folder)
        finally:
            other.kill()
    assert records_of(first.run_folder) == before
    second = make_trainer(run_name="run", max_steps=3, resume="auto")
    assert second.global_step == 1


def records_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def test_the_evaluation_before_training_is_recorded_once(make_trainer, records) -> None:
    keys = {"run_name": "run", "resume": "auto", "max_steps": 2, "eval_dataset": sums(2), "save_steps": 2}
    for _ in range(2):
        broken = make_trainer(**keys)
        evaluator_of(broken).at_start()  # and then it dies
        broken.close()
    trainer = make_trainer(**keys)
    trainer.fit()
    assert [line["step"] for line in records(trainer)] == [0, 1, 2]
