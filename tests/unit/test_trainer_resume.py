"""A run that was broken off and resumed is, bit for bit, the run that went straight through."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_rl.checkpoint.finding import newest_checkpoint
from hybrid_rl.errors import CheckpointError, ConfigError, DataError, HybridRLError
from tests.support.inside.trainers import evaluator_of
from tests.support.inside.workers import worker_of
from tests.support.optimizer_state import same_optimizer
from tests.support.tiny import build_model, sums

pytestmark = pytest.mark.slow  # the file as a whole

SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 2}


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "keys",
    [
        {"max_steps": 6},
        {"max_steps": 6, "num_iterations": 2, "prompts_per_mini_batch": 2, **SCHEDULE},
        {"num_train_epochs": 2.0},
        {"max_steps": 6, "beta": 0.1},
        {"max_steps": 6, "dtype": "bfloat16"},
        {"max_steps": 6, "train_dataset": lambda: iter(sums(10))},
        {"max_steps": 6, "shuffle": False, "train_dataset": sums(5), "eval_dataset": sums(2), "eval_steps": 2},
    ],
    ids=["plain", "iterations", "epoch boundary", "reference", "bfloat16", "stream", "eval"],
)
@pytest.mark.parametrize("broken_at", [pytest.param(1, marks=pytest.mark.sweep), 3])
def test_resume_is_bit_exact(make_trainer, tmp_path, records, keys: dict, broken_at: int) -> None:
    """12 prompts in steps of 4: step 3 ends an epoch. Every run starts from the same weights on disk."""
    keys = {"save_steps": broken_at, "run_name": "run"} | keys
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
    assert same_optimizer(*ends)


def test_reference_of_a_resumed_run_is_the_initial_model(make_trainer) -> None:
    """Not the model of the checkpoint: the KL term continues as before."""
    keys = {"max_steps": 3, "beta": 0.1, "save_steps": 2, "run_name": "run"}
    broken = make_trainer(**keys)
    broken.step()
    kl = broken.step().metrics["kl"]
    resumed = make_trainer(**keys, resume="auto")
    assert resumed.step().metrics["kl"] > kl > 1e-6


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


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_model_that_is_named_by_a_damaged_checkpoint_is_told_by_its_file(make_trainer, file: str) -> None:
    """Not by what a library makes of it: the tokenizer is read before the weights are."""
    first = make_trainer(max_steps=1)
    path = first.save() / file
    path.write_bytes(path.read_bytes()[:-5])
    for arguments in ({"model": str(path.parent)}, {"resume": str(path.parent)}):
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            make_trainer(**arguments, max_steps=1)


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
    assert kept.read_bytes()[-1] == data[-1] ^ 1 and weights_of(resumed.run_folder / "checkpoint-4") == data
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


def test_finished_run_can_be_prolonged(make_trainer, records) -> None:
    keys = {"run_name": "run", "save_steps": 2}
    make_trainer(max_steps=2, **keys).fit()
    longer = make_trainer(max_steps=4, resume="auto", **keys)
    longer.fit()
    assert [line["step"] for line in records(longer)] == [0, 1, 2, 3, 4]


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


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_damaged_optimizer_state_is_refused(make_trainer, damage: str) -> None:
    first = make_trainer(run_name="run", max_steps=4)
    first.step()
    (path,) = (first.save() / "optimizer").glob("*.safetensors")
    (path.parents[1] / "manifest.json").unlink()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    with pytest.raises(CheckpointError, match=r"cannot read .*optimizer"):
        make_trainer(run_name="run", max_steps=4, resume=str(path.parents[1]))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/shard-00001-model-00001-of-00001.safetensors"])
def test_a_flipped_bit_is_told_before_anything_is_loaded(make_trainer, monkeypatch, file: str) -> None:
    """It would be read without a word: one number of the weights or moments would be another one."""
    first = make_trainer(run_name="run", max_steps=4)
    first.step()
    path = first.save() / file
    first.close()
    data = bytearray(path.read_bytes())
    data[-3] ^= 64
    path.write_bytes(data)
    monkeypatch.setattr("hybrid_rl.run.crew.start_workers", lambda *_: pytest.fail("the weights are loaded"))
    with pytest.raises(CheckpointError, match=f"{path} is damaged: its content is not what was written"):
        make_trainer(run_name="run", max_steps=4, resume="auto")
    if file == "model.safetensors":
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            make_trainer(str(path.parent), max_steps=4)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("optimizer/scalars.json", {"schedule": None}),
        ("optimizer/scalars.json", {"schedule": {}}),
        ("optimizer/scalars.json", {"schedule": {"last_epoch": "x"}}),
        ("optimizer/scalars.json", {"algorithm": 3}),
        ("optimizer/scalars.json", {"exp_avg": 3}),
        ("trainer_state.json", {"global_step": 2}),
        ("trainer_state.json", {"global_step": None}),
        ("trainer_state.json", {"num_tokens": "many"}),
        ("trainer_state.json", {"sampler": 3}),
        ("trainer_state.json", {"sampler": {"version": {}}}),
    ],
)
def test_entries_that_cannot_be_are_told_with_the_name_of_the_file(make_trainer, file: str, change: dict) -> None:
    """In a checkpoint whose manifest was deleted, which nothing can be compared with."""
    keys = {"run_name": "run", "max_steps": 4, "beta": 0.1, "kl_target": 0.1}
    first = make_trainer(**keys)
    first.step()
    folder = first.save()
    first.close()
    (folder / "manifest.json").unlink(missing_ok=True)
    entries = json.loads((folder / file).read_text()) | change
    (folder / file).write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))
    with pytest.raises((CheckpointError, DataError)) as caught:
        make_trainer(**keys, resume=str(folder))
    assert str(folder / file) in str(caught.value)


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


def test_newest_checkpoint_is_the_one_with_the_most_steps(tmp_path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-x", ".checkpoint-99.1.tmp"):
        (tmp_path / name).mkdir()
        if name != "checkpoint-11":
            state = {"global_step": 9 if name == "checkpoint-9" else 10, "num_tokens": 0, "sampler": {}}
            (tmp_path / name / "trainer_state.json").write_text(json.dumps(state))
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.folder == tmp_path / "checkpoint-10"


def test_state_of_a_checkpoint(make_trainer) -> None:
    trainer = make_trainer()
    trainer.fit()
    state = json.loads((trainer.save() / "trainer_state.json").read_text())
    assert (state["global_step"], state["num_tokens"]) == (2, trainer.num_tokens)
    assert state["sampler"]["position"] == 8
    assert state["config"]["optimizer"]["learning_rate"] == 1e-2


def test_update_that_broke_off_is_neither_saved_nor_trained_on(make_trainer, monkeypatch) -> None:
    """Between two steps the weights belong to no step: everything but a new Trainer is refused."""
    trainer = make_trainer(max_steps=3, run_name="run", save_steps=1)
    trainer.step()

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker_of(trainer), "update", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.step()
    for call in (trainer.step, trainer.save, lambda: trainer.generate("1")):
        with pytest.raises(HybridRLError, match="was interrupted"):
            call()
    assert make_trainer(max_steps=3, run_name="run", resume="auto").global_step == 1
