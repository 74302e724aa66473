"""A checkpoint that is written while training goes on is that of the step that began it, whole or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.checkpoint import snapshot
from hybrid_rl.checkpoint.background import PART, BackgroundWrite
from hybrid_rl.checkpoint.finding import hidden_name
from hybrid_rl.checkpoint.manifest import MANIFEST_FILE, check_checkpoint
from hybrid_rl.checkpoint.reading import read_state
from hybrid_rl.checkpoint.snapshot import Room, Snapshot, missing_room
from hybrid_rl.checkpoint.writing import begin_checkpoint, write_checkpoint
from hybrid_rl.errors import CheckpointError
from hybrid_rl.process.files import Sink, save_tensors
from tests.support.inside.memory import group_bytes
from tests.support.optimizer_state import read_optimizer

WEIGHTS = torch.arange(6.0)
STATE = {"global_step": 4, "num_tokens": 7}


def save_model(folder: Path, sink: Sink | None = None) -> None:
    """The weights as tensors, and a text in a folder of its own, as tokenizers have."""
    own = WEIGHTS if sink is None else WEIGHTS.clone()
    (sink or save_tensors)({"weight": own}, folder / "model.safetensors", {"format": "pt"})
    (folder / "templates").mkdir()
    (folder / "templates" / "chat.jinja").write_text("{{ messages }}")


def optimizer() -> dict[str, Any]:
    return {"exp_avg": {"weight": torch.arange(3.0)}, "step": 7}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def meanings(folder: Path) -> dict[str, Any]:
    """The same without the order of metadata in tensor files, which safetensors leaves to chance, and what follows."""
    found: dict[str, Any] = contents(folder)
    for name in [name for name in found if name.endswith(".safetensors")]:
        end = 8 + int.from_bytes(found[name][:8], "little")
        found[name] = (json.loads(found[name][8:end]), found[name][end:])
    del found[MANIFEST_FILE]
    return found


def begin(folder: Path, values: Any = None, save: Any = save_model) -> BackgroundWrite:
    begun = begin_checkpoint(folder, save, optimizer() if values is None else values, STATE)
    assert isinstance(begun, BackgroundWrite)
    return begun


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "checkpoint-4"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Threads write nothing before it is set."""
    event, write = threading.Event(), snapshot.save_tensors

    def waiting(*arguments: Any) -> None:
        assert event.wait(60)
        write(*arguments)

    monkeypatch.setattr(snapshot, "save_tensors", waiting)
    yield event
    event.set()


def test_it_is_what_would_have_been_written_at_once(folder: Path, gate: threading.Event) -> None:
    """Whatever training changes meanwhile."""
    write_checkpoint(folder.with_name("checkpoint-04"), save_model, optimizer(), STATE)
    values = optimizer()
    begun = begin(folder, values)
    values["exp_avg"]["weight"].zero_()
    values["step"] = 8
    assert not begun.progress().is_done and not folder.exists()
    gate.set()
    begun.join()
    assert begun.progress().error == ""
    check_checkpoint(folder)
    assert meanings(folder) == meanings(folder.with_name("checkpoint-04"))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint-04", "checkpoint-4"]


@pytest.mark.parametrize("there_before", [True, False])
def test_a_failure_of_the_thread_leaves_everything_as_it_was(folder: Path, monkeypatch, there_before: bool) -> None:
    folder.parent.mkdir()
    if there_before:
        write_checkpoint(folder, save_model, optimizer(), STATE | {"num_tokens": 1})
    before = contents(folder) if there_before else None

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "sync", full)
    begun = begin(folder)
    begun.join()
    assert begun.progress().error == "OSError: [Errno 28] No space left on device"
    assert [path.name for path in folder.parent.iterdir()] == (["checkpoint-4"] if there_before else [])
    assert before is None or contents(folder) == before


def test_what_goes_wrong_while_it_is_copied_is_raised_at_once(folder: Path) -> None:
    def failing(target: Path, sink: Sink | None = None) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=f"cannot write checkpoint {folder}: .*No space left"):
        begin(folder, save=failing)
    assert list(folder.parent.iterdir()) == []
    (folder.parent / "checkpoint-4").mkdir()
    (folder / "thesis").write_text("1")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        begin(folder)
    assert contents(folder.parent) == {"checkpoint-4/thesis": b"1"}


def test_everything_is_on_the_disk_before_it_gets_its_name(folder: Path, synced: list[str]) -> None:
    folder.parent.mkdir()
    (folder.parent / "metrics.jsonl").touch()
    begin(folder).join()
    at = synced.index(f"rename {folder}")
    before = {path.rpartition(".tmp")[2] for path in synced[:at]}
    assert before >= {"", "/templates", *(f"/{name}" for name in contents(folder))}
    assert str(folder.parent / "metrics.jsonl") in synced[:at]
    assert synced[at + 1 :] == [str(folder.parent)]


# --------------------------------------------------------------------------------------------------- several ranks


def both(folder: Path) -> tuple[Path, list[Snapshot]]:
    common = hidden_name(folder, "tmp")
    common.mkdir(parents=True)

    def part(rank: int) -> Snapshot:
        def save(target: Path, sink: Sink | None = None) -> None:
            assert sink is not None
            sink({"weight": torch.full((2,), float(rank))}, target / f"model-{rank}.safetensors", {"format": "pt"})

        return Snapshot.take(save, {"": optimizer()}, rank)

    return common, [part(rank) for rank in range(2)]


def test_it_appears_when_all_ranks_have_written(folder: Path, gate: threading.Event) -> None:
    common, (leader, other) = both(folder)
    gate.set()
    first = BackgroundWrite(folder, common, leader, json.dumps(STATE), rank=0, num_ranks=2)
    while not (common / "optimizer" / "scalars.json").exists():  # the last that it writes before it waits
        time.sleep(0.01)
    assert not first.progress(0.2).is_done and not folder.exists()
    second = BackgroundWrite(folder, common, other, "", rank=1, num_ranks=2)
    first.join()
    assert [one.progress().error for one in (first, second)] == ["", ""]
    check_checkpoint(folder)
    assert read_state(folder) == STATE and read_optimizer(folder)["step"] == 7
    named = set(json.loads((folder / MANIFEST_FILE).read_text())["files"])
    assert {"model-0.safetensors", "model-1.safetensors"} < named
    assert named | {MANIFEST_FILE} == set(contents(folder)) and not any(PART[:6] in name for name in contents(folder))
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-4"]


def test_a_leader_that_waits_for_a_rank_that_failed_gives_up(folder: Path) -> None:
    common, (leader, _) = both(folder)
    first = BackgroundWrite(folder, common, leader, json.dumps(STATE), rank=0, num_ranks=2)
    first.give_up()
    first.join()
    assert first.progress().error == "given up"
    assert list(folder.parent.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------- memory


def test_room_is_counted_by_host() -> None:
    """100 bytes are available, of which 80 may be taken."""
    assert missing_room([Room("a", 40, 100), Room("a", 40, 110), Room("b", 80, 100)]) is None
    assert missing_room([Room("a", 40, 100), Room("b", 60, 200), Room("a", 41, 110)]) == Room("a", 81, 100)
    values = {"": {"exp_avg": {"w": torch.zeros(10)}, "step": 1}, "critic": {"master": {"w": torch.zeros(2)}}}
    assert [Room.of(5, values, rank).num_bytes for rank in (0, 1)] == [5 + 48, 5]


def test_a_snapshot_that_does_not_fit_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "available_host_bytes", lambda: 44)
    found = begin_checkpoint(folder, save_model, optimizer(), STATE, model_bytes=24)
    assert isinstance(found, Room) and (found.num_bytes, found.available_bytes) == (36, 44)
    assert isinstance(begin_checkpoint(folder, save_model, optimizer(), STATE, model_bytes=24), Room)
    assert not folder.parent.exists()


def test_available_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    """1000 of 4000 bytes are used, of which 300 are pages of files; the group around it has no limit."""
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("4000\n")
    (group / "memory.current").write_text("1000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    (tmp_path / "job" / "memory.max").write_text("max\n")
    (tmp_path / "job" / "memory.current").write_text("5\n")
    (tmp_path / "job" / "memory.stat").write_text("inactive_file 0\n")
    own = tmp_path / "cgroup"
    own.write_text("1:cpu:/x\n0::/job/step\n")
    assert group_bytes(tmp_path, own) == [3300]
    own.write_text("1:cpu:/x\n")
    assert group_bytes(tmp_path, own) == []
