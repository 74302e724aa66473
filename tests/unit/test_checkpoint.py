"""Checkpoints appear whole or not at all, and what is damaged is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.checkpoint import (
    OPTIMIZER_FOLDER,
    SCALARS_FILE,
    STATE_FILE,
    find_checkpoint,
    newest_checkpoint,
    read_optimizer,
    read_optimizer_into,
    read_state,
    write_checkpoint,
)
from hybrid_rl.errors import CheckpointError

SHARDS = f"{OPTIMIZER_FOLDER}/shard-00001-model-00001-of-00001.safetensors"
SCALARS = f"{OPTIMIZER_FOLDER}/{SCALARS_FILE}"


def model_of(value: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "weights").write_text(value) and None


def write(folder: Path, value: str = "new", state: Any = None) -> None:
    optimizer = {"exp_avg": {"layer.weight": torch.arange(3.0), "bias": torch.ones(())}, "master": {}, "step": 7}
    write_checkpoint(folder, model_of(value), optimizer, {"global_step": 4} if state is None else state)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def failing_model(error: BaseException) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise error

    return save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "checkpoint-4"


def test_what_is_written_is_read(folder: Path) -> None:
    write(folder, state={"global_step": 4, "sampler": {"epoch": 0.5}})
    assert read_state(folder) == {"global_step": 4, "sampler": {"epoch": 0.5}}
    optimizer = read_optimizer(folder)
    assert optimizer["step"] == 7 and optimizer["master"] == {}
    assert optimizer["exp_avg"].keys() == {"layer.weight", "bias"}
    assert torch.equal(optimizer["exp_avg"]["layer.weight"], torch.arange(3.0))
    assert (folder / "weights").read_text() == "new"
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-4"]


def test_further_models_have_optimizers_in_folders_of_their_own(folder: Path) -> None:
    def save_models(target: Path) -> None:
        (target / "weights").touch()
        (target / "critic" / "weights").touch()

    states = [{"exp_avg": {"weight": torch.full((2,), number)}, "step": number} for number in (1.0, 2.0)]
    write_checkpoint(folder, save_models, states[0], {}, parts={"critic": states[1]})
    assert set(contents(folder)) == {
        *("weights", SHARDS, SCALARS, STATE_FILE),
        *(f"critic/{name}" for name in ("weights", SHARDS, SCALARS)),
    }
    for number, place in ((1.0, folder), (2.0, folder / "critic")):
        found = read_optimizer_into(place, {"exp_avg": {"weight": torch.zeros(2)}})
        assert found["step"] == number and found["exp_avg"]["weight"].tolist() == [number, number]


def test_a_further_models_optimizer_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        write_checkpoint(folder, model_of("new"), {"step": 1}, {}, parts={"critic": {"closure": lambda: None}})
    assert not folder.exists() and list(folder.parent.iterdir()) == []


def test_a_new_one_replaces_an_old_one_wholly(folder: Path) -> None:
    write(folder, "old")
    (folder / "left_over").touch()
    write(folder, "new")
    assert set(contents(folder)) == {"weights", SHARDS, SCALARS, STATE_FILE}
    assert (folder / "weights").read_text() == "new"
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-4"]


def test_an_empty_folder_may_be_named(folder: Path) -> None:
    folder.mkdir(parents=True)
    write(folder)
    assert read_state(folder)


FAILURES = {
    "model": (failing_model(OSError(28, "No space left on device")), {}, {}, CheckpointError),
    "interrupt": (failing_model(KeyboardInterrupt()), {}, {}, KeyboardInterrupt),
    "optimizer": (model_of("new"), {"closure": lambda: None}, {}, CheckpointError),
    "state": (model_of("new"), {}, {"step": object()}, CheckpointError),
}


@pytest.mark.parametrize("there_before", [True, False])
@pytest.mark.parametrize(("save", "optimizer", "state", "expected"), FAILURES.values(), ids=FAILURES)
def test_a_failure_in_the_middle_leaves_everything_as_it_was(
    folder: Path,
    there_before: bool,
    save: Callable[[Path], None],
    optimizer: dict[str, Any],
    state: dict[str, Any],
    expected: type[BaseException],
) -> None:
    folder.parent.mkdir(parents=True)
    if there_before:
        write(folder, "old")
    before = contents(folder) if there_before else None
    with pytest.raises(expected) as caught:
        write_checkpoint(folder, save, optimizer, state)
    if expected is CheckpointError:
        assert "cannot write checkpoint" in str(caught.value) and "earlier checkpoints are untouched" in str(
            caught.value
        )
        assert caught.value.__cause__ is not None
    assert [path.name for path in folder.parent.iterdir()] == (["checkpoint-4"] if there_before else [])
    assert before is None or contents(folder) == before


def test_everything_is_on_the_disk_before_it_gets_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronised under the temporary name: every file, every folder; after the rename the folder above."""
    synced: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def recording_rename(path: Path, target: Path) -> Path:
        synced.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    write(folder)
    at = synced.index("rename")
    temporary = next(path for path in synced if path.endswith(".tmp"))
    before = {path.removeprefix(temporary) for path in synced[:at]}
    assert before >= {"", "/weights", f"/{OPTIMIZER_FOLDER}", f"/{SHARDS}", f"/{SCALARS}", f"/{STATE_FILE}"}
    assert synced[at + 1 :] == [str(folder.parent)]


def test_a_failure_of_the_last_rename_puts_the_old_one_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "old")
    before, rename = contents(folder), Path.rename

    def refuse_the_new(path: Path, target: Path) -> Path:
        if path.name.endswith(".tmp"):
            raise OSError("refused")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new)
    with pytest.raises(CheckpointError, match="refused"):
        write(folder, "new")
    assert contents(folder) == before and [path.name for path in folder.parent.iterdir()] == ["checkpoint-4"]


@pytest.mark.parametrize("kind", ["folder", "file", "parent"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "thesis"
    if kind == "folder":
        target.mkdir()
        (target / "chapter").write_text("1")
    else:
        target.write_text("1")
    with pytest.raises(CheckpointError, match=str(target)):
        write(target / "checkpoint-4" if kind == "parent" else target)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
    assert (target / "chapter" if kind == "folder" else target).read_text() == "1"


# ------------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("damage", ["", '{"global_step": ', "\x00\x01", "[1, 2]"])
def test_a_damaged_state(folder: Path, damage: str) -> None:
    write(folder)
    (folder / STATE_FILE).write_text(damage)
    with pytest.raises(CheckpointError, match=f"{STATE_FILE} is damaged"):
        read_state(folder)


@pytest.mark.parametrize("file", [SHARDS, SCALARS])
@pytest.mark.parametrize("keep", [0, 10, -5])
def test_a_damaged_optimizer(folder: Path, file: str, keep: int) -> None:
    write(folder)
    (folder / file).write_bytes((folder / file).read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"cannot read .*{OPTIMIZER_FOLDER}"):
        read_optimizer(folder)


def test_an_optimizer_is_read_into_the_memory_that_is_there(folder: Path) -> None:
    write(folder)
    weight, bias = torch.zeros(3), torch.zeros(())
    state = {"exp_avg": {"layer.weight": weight, "bias": bias}, "master": {}, "step": 0}
    read = read_optimizer_into(folder, state)
    assert read["exp_avg"]["layer.weight"] is weight and weight.tolist() == [0, 1, 2]
    assert read["exp_avg"]["bias"] is bias and bias == 1 and read["step"] == 7 and read["master"] == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.full((2,), 9.0)}, r"bias is torch.float32 \[\], here torch.float32 \[2\]"),
        ({"bias": torch.tensor(9.0, dtype=torch.float64)}, "bias is torch.float32 .*, here torch.float64"),
        ({"more": torch.tensor(9.0)}, r"differs in 1 tensors, e\.g\. exp_avg\.more \(not in the checkpoint\)"),
        ({"bias": None}, r"differs in 1 tensors, e\.g\. exp_avg\.bias \(only in the checkpoint\)"),
    ],
)
def test_an_optimizer_of_another_model_changes_nothing(folder: Path, change: dict[str, Any], message: str) -> None:
    write(folder)
    tensors = {"layer.weight": torch.full((3,), 9.0), "bias": torch.tensor(9.0)} | change
    state = {"exp_avg": {name: tensor for name, tensor in tensors.items() if tensor is not None}}
    with pytest.raises(CheckpointError, match=message):
        read_optimizer_into(folder, state)
    assert all((tensor == 9).all() for tensor in state["exp_avg"].values())


def test_missing_parts(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"is not a checkpoint: it has no {STATE_FILE}"):
        read_state(folder)
    with pytest.raises(CheckpointError, match=f"cannot read .*{OPTIMIZER_FOLDER}"):
        read_optimizer(folder)


def test_an_optimizer_file_runs_no_code(folder: Path) -> None:
    write(folder)
    torch.save({"code": Path("x")}, folder / SHARDS)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_optimizer(folder)


# ------------------------------------------------------------------------------------------------------------ finding


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints 9 and 10 (the later in number, the earlier in the alphabet), and what only looks like one."""
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11-copy", "checkpoint-x"):
        write(tmp_path / "run" / name)
    (tmp_path / "run" / "checkpoint-12").mkdir()
    (tmp_path / "run" / "checkpoint-13").write_text("a file")
    return tmp_path / "run"


def test_newest_is_the_one_with_the_most_steps(run: Path) -> None:
    assert newest_checkpoint(run) == run / "checkpoint-10"


def test_resume_auto_finds_it(run: Path) -> None:
    assert find_checkpoint("auto", str(run.parent), run.name) == run / "checkpoint-10"


def test_resume_auto_before_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        assert newest_checkpoint(tmp_path / name) is None
        assert find_checkpoint("auto", str(tmp_path), name) is None
        assert f"{name} has no checkpoint yet; starting from the beginning" in caplog.text


def test_resume_of_a_folder(run: Path) -> None:
    assert find_checkpoint(None, str(run.parent), run.name) is None
    assert find_checkpoint(str(run / "checkpoint-9"), "elsewhere", None) == run / "checkpoint-9"
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        find_checkpoint(str(run), "elsewhere", None)
    (run / "checkpoint-9" / STATE_FILE).write_text(json.dumps({"global_step": 9})[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        find_checkpoint(str(run / "checkpoint-9"), "elsewhere", None)


def dead_process() -> int:
    """The number of a process that has ended."""
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(done.stdout)


def test_what_a_killed_process_left_is_cleared_up(tmp_path) -> None:
    """Killed between two renames: the old checkpoint had been moved away, the new one was not there yet."""
    gone = dead_process()
    run = tmp_path / "run"
    old = run / f".checkpoint-3.{gone}.old"
    unfinished = run / f".checkpoint-4.{gone}.tmp"
    alive = run / f".checkpoint-5.{os.getpid()}.tmp"
    for folder in (old, unfinished, alive):
        folder.mkdir(parents=True)
    (old / STATE_FILE).write_text("{}")
    assert newest_checkpoint(run) == run / "checkpoint-3"
    assert sorted(path.name for path in run.iterdir()) == [alive.name, "checkpoint-3"]
