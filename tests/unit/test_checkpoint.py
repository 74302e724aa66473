"""Checkpoints appear whole or not at all, and what is damaged is named."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.checkpoint.finding import check_resumed, find_checkpoint, newest_checkpoint
from hybrid_rl.checkpoint.manifest import MANIFEST_FILE, check_checkpoint, check_model, check_model_texts
from hybrid_rl.checkpoint.owners import Owner
from hybrid_rl.checkpoint.reading import (
    OPTIMIZER_FOLDER,
    SCALARS_FILE,
    STATE_FILE,
    Checkpoint,
    read_optimizer_into,
    read_state,
)
from hybrid_rl.checkpoint.writing import write_checkpoint
from hybrid_rl.errors import CheckpointError
from tests.support.optimizer_state import read_optimizer
from tests.support.owners import ended_owner

SHARDS = f"{OPTIMIZER_FOLDER}/shard-00001-model-00001-of-00001.safetensors"
SCALARS = f"{OPTIMIZER_FOLDER}/{SCALARS_FILE}"


def model_of(value: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "weights").write_text(value) and None


def write(folder: Path, value: str = "new", state: Any = None) -> None:
    optimizer = {"exp_avg": {"layer.weight": torch.arange(3.0), "bias": torch.ones(())}, "master": {}, "step": 7}
    named = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    step = {"global_step": int(named[1]) if named else 4, "num_tokens": 0, "sampler": {}}
    write_checkpoint(folder, model_of(value), optimizer, step if state is None else state)


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
        *("weights", SHARDS, SCALARS, STATE_FILE, MANIFEST_FILE),
        *(f"critic/{name}" for name in ("weights", SHARDS, SCALARS)),
    }
    for number, place in ((1.0, folder), (2.0, folder / "critic")):
        found = read_optimizer_into(place, {"exp_avg": {"weight": torch.zeros(2)}})
        assert found["step"] == number and found["exp_avg"]["weight"].tolist() == [number, number]


def test_a_new_one_replaces_an_old_one_wholly(folder: Path) -> None:
    write(folder, "old")
    (folder / "left_over").touch()
    write(folder, "new")
    assert set(contents(folder)) == {"weights", SHARDS, SCALARS, STATE_FILE, MANIFEST_FILE}
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
        is_of_disk = isinstance(caught.value.__cause__, OSError)
        assert ("Free space or choose another folder" in str(caught.value)) == is_of_disk
        assert ("Correct what it names" in str(caught.value)) != is_of_disk
    assert [path.name for path in folder.parent.iterdir()] == (["checkpoint-4"] if there_before else [])
    assert before is None or contents(folder) == before


def test_everything_is_on_the_disk_before_it_gets_its_name(folder: Path, synced: list[str]) -> None:
    """Synchronised under the temporary name: every file, every folder; after the rename the folder above. The records
    of its steps too."""
    folder.parent.mkdir()
    for name in ("metrics.jsonl", "samples.jsonl"):
        (folder.parent / name).touch()
    write(folder)
    at = synced.index(f"rename {folder}")
    temporary = next(path for path in synced if path.endswith(".tmp"))
    before = {path.removeprefix(temporary) for path in synced[:at]}
    assert {str(folder.parent / name) for name in ("metrics.jsonl", "samples.jsonl")} <= before
    files = ("weights", OPTIMIZER_FOLDER, SHARDS, SCALARS, STATE_FILE, MANIFEST_FILE)
    assert before >= {"", *(f"/{name}" for name in files)}
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


IMPOSSIBLE: list[dict[str, Any]] = [
    {"global_step": "4"},
    {"global_step": -4},
    {"global_step": True},
    {"global_step": 4.0},
    {"global_step": 4, "num_tokens": None},
    {"global_step": 4, "sampler": []},
    {"global_step": 4, "config": "x"},
]


@pytest.mark.parametrize("text", ["", '{"global_step": ', "\x00\x01", "[1, 2]", *map(json.dumps, IMPOSSIBLE)])
def test_a_damaged_state(folder: Path, text: str) -> None:
    write(folder)
    (folder / STATE_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=f"{STATE_FILE} is damaged: "):
        read_state(folder)


@pytest.mark.parametrize("file", [SHARDS, SCALARS])
@pytest.mark.parametrize("keep", [0, 10, -5])
def test_a_damaged_optimizer(folder: Path, file: str, keep: int) -> None:
    write(folder)
    (folder / file).write_bytes((folder / file).read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"cannot read .*{OPTIMIZER_FOLDER}"):
        read_optimizer_into(folder, own_state())


def own_state() -> dict[str, Any]:
    """Of the model whose optimizer `write` writes."""
    return {"exp_avg": {"layer.weight": torch.zeros(3), "bias": torch.zeros(())}, "master": {}, "step": 0}


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
        ({"more": torch.tensor(9.0)}, r"1 tensors differ, e\.g\. exp_avg\.more \(not in the checkpoint\)"),
        ({"bias": None}, r"1 tensors differ, e\.g\. exp_avg\.bias \(only in the checkpoint\)"),
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
        read_optimizer_into(folder, own_state())


def test_an_optimizer_file_runs_no_code(folder: Path) -> None:
    write(folder)
    torch.save({"code": Path("x")}, folder / SHARDS)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_optimizer_into(folder, own_state())


# ------------------------------------------------------------------------------------------------------------- damage


def whole(folder: Path) -> Path:
    """A checkpoint with every kind of file."""

    def save_models(target: Path) -> None:
        for name in ("model.safetensors", "model.safetensors.index.json", "tokenizer.json", "critic/model.safetensors"):
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text(f"what {name} holds")

    optimizer = {"exp_avg": {"weight": torch.arange(3.0)}, "step": 7}
    write_checkpoint(folder, save_models, optimizer, {"global_step": 4}, parts={"critic": optimizer})
    return folder


FILES = ["model.safetensors", "model.safetensors.index.json", "critic/model.safetensors", SHARDS, SCALARS, STATE_FILE]


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
@pytest.mark.parametrize("file", [*FILES, f"critic/{SHARDS}"])
def test_damage_is_told_with_the_name_of_the_file(folder: Path, file: str, damage: str) -> None:
    path = whole(folder) / file
    check_checkpoint(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "bit" else data[:-1])
    told = {"bit": "its content is not what was written", "cut": "it has .* bytes, but", "gone": "it is missing"}
    with pytest.raises(CheckpointError, match=f"{path} is damaged: {told[damage]}.* delete {MANIFEST_FILE} next to it"):
        check_checkpoint(folder)


def test_texts_of_the_model_may_be_edited(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A chat template, say. Resuming does not read them, and a damaged one is worth a line."""
    (whole(folder) / "tokenizer.json").write_text('"other"')
    (folder / "README.md").write_text("a model card")
    check_checkpoint(folder)
    check_model(folder)
    assert caplog.text.count("it has 7 bytes, but 25 were written. If nobody edited it, it is damaged") == 2


@pytest.mark.parametrize("damage", ["cut", "gone", "empty", "zeros", "no text"])
def test_a_text_of_the_model_that_nobody_can_have_edited_is_damaged(folder: Path, damage: str) -> None:
    """Whether it is read or not: what comes with it may be damaged too. A text that is no JSON is cut unseen."""
    path = whole(folder) / "tokenizer.json"
    data = {"cut": b'{"model": [1, 2', "empty": b"", "zeros": bytes(25), "no text": b'"\xff"'}.get(damage)
    path.unlink() if data is None else path.write_bytes(data)
    for check in (check_checkpoint, check_model, check_model_texts):
        with pytest.raises(CheckpointError, match=f"{path} is damaged: its? "):
            check(folder)
    (whole(folder) / "model.safetensors").write_text("damaged")
    check_model_texts(folder)
    (folder / "chat_template.jinja").write_bytes(b"{{ x }}\0\0")  # lengthened, or blocks that never reached the disk
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"]["chat_template.jinja"] = manifest["files"]["tokenizer.json"]
    text = json.dumps(manifest["files"], sort_keys=True).encode()
    manifest["digest"] = hashlib.blake2b(text, digest_size=16).hexdigest()
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"chat_template.jinja is damaged: it has 9 bytes"):
        check_model_texts(folder)


@pytest.mark.parametrize("damage", ["bit", "cut", "type", "empty"])
def test_a_damaged_manifest(folder: Path, damage: str) -> None:
    path = whole(folder) / MANIFEST_FILE
    text = path.read_text()
    texts = {"bit": text.replace('"size": 7', '"size": 6', 1).replace('"size": 2', '"size": 3', 1), "cut": text[:-9]}
    path.write_text(texts.get(damage, "[]" if damage == "type" else ""))
    for check in (check_checkpoint, check_model):
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            check(folder)


def test_a_checkpoint_without_a_manifest_is_read_only_if_it_is_named(folder: Path, caplog) -> None:
    (whole(folder) / MANIFEST_FILE).unlink()
    with pytest.raises(
        CheckpointError, match=f"{folder} has no {MANIFEST_FILE}.*resume={folder} reads it all the same"
    ):
        check_checkpoint(folder)
    check_checkpoint(folder, needs_manifest=False)
    assert f"{folder} has no {MANIFEST_FILE}, so nothing in it can be checked" in caplog.text
    caplog.clear()
    check_model(folder)
    assert caplog.text == ""


def test_a_model_is_compared_without_what_it_does_not_need(folder: Path) -> None:
    """Used as a model: its optimizer and state are of no interest, those of its critic neither."""
    for name in (SHARDS, SCALARS, STATE_FILE, "critic/model.safetensors"):
        (whole(folder) / name).write_text("damaged")
        check_model(folder)
    whole(folder)
    check_model(folder / "critic")
    (folder / "critic" / SHARDS).write_text("damaged")
    check_model(folder / "critic")
    (folder / "critic" / "model.safetensors").write_text("damaged")
    with pytest.raises(CheckpointError, match="critic/model.safetensors is damaged"):
        check_model(folder / "critic")
    check_model(folder.parent)  # no checkpoint, and nothing beside it


def test_a_state_of_another_step_than_the_folders_name(folder: Path) -> None:
    write(folder)
    with pytest.raises(CheckpointError, match="its global_step is 7, but the folder is named checkpoint-4"):
        write(folder, state={"global_step": 7})
    assert read_state(folder)["global_step"] == 4
    renamed = folder.rename(folder.with_name("checkpoint-9"))
    with pytest.raises(CheckpointError, match=f"{renamed / STATE_FILE} .* global_step is 4, but .* checkpoint-9"):
        find_checkpoint("auto", str(renamed.parents[1]), renamed.parent.name)
    assert Checkpoint.read(renamed.rename(folder.with_name("best"))).step == 4


@pytest.mark.parametrize("scalars", [{"exp_avg": 3}, {"exp_avg": [1]}, {"exp_avg": "x"}])
def test_scalars_that_cannot_be(folder: Path, scalars: dict[str, Any]) -> None:
    write(folder)
    (folder / SCALARS).write_text(json.dumps(scalars))
    state = {"exp_avg": {"layer.weight": torch.zeros(3), "bias": torch.zeros(())}}
    with pytest.raises(CheckpointError, match=f"{SCALARS} is damaged"):
        read_optimizer_into(folder, state)


# ------------------------------------------------------------------------------------------------------------ finding


def resumed(resume: str | None, output_dir: str, run_name: str | None) -> Path | None:
    checkpoint = find_checkpoint(resume, output_dir, run_name)
    return None if checkpoint is None else checkpoint.folder


def newest(run: Path, *, is_ours: bool = False) -> Path | None:
    checkpoint = newest_checkpoint(run, is_ours=is_ours)
    return None if checkpoint is None else checkpoint.folder


def checked(folder: Path, *, is_auto: bool) -> Path:
    return check_resumed(Checkpoint.read(folder), is_auto=is_auto).folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints 9 and 10 (the later in number, the earlier in the alphabet), and what only looks like one."""
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11-copy", "checkpoint-x"):
        write(tmp_path / "run" / name)
    (tmp_path / "run" / "checkpoint-12").mkdir()
    (tmp_path / "run" / "checkpoint-13").write_text("a file")
    return tmp_path / "run"


def test_newest_is_the_one_with_the_most_steps(run: Path) -> None:
    assert newest(run) == resumed("auto", str(run.parent), run.name) == run / "checkpoint-10"


def test_resume_auto_before_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        assert newest(tmp_path / name) is None
        assert resumed("auto", str(tmp_path), name) is None
        assert f"{name} has no checkpoint yet; starting from the beginning" in caplog.text


def test_a_damaged_newest_one_falls_back_to_the_newest_that_is_intact(run: Path, caplog) -> None:
    write(run / "checkpoint-8")
    last = run / "checkpoint-10"
    (last / "weights").write_text("")
    assert checked(last, is_auto=True) == run / "checkpoint-9"
    (line,) = (message for message in caplog.messages if "going on from" in message)
    assert line.startswith(f"resume=auto: going on from {run / 'checkpoint-9'}, the newest checkpoint that is intact")
    assert f"{last / 'weights'} is damaged: it has 0 bytes, but 3 were written. The damaged one is kept" in line
    assert checked(run / "checkpoint-9", is_auto=True) == run / "checkpoint-9"
    with pytest.raises(CheckpointError, match="to skip this check$"):
        checked(last, is_auto=False)
    caplog.clear()
    (run / "checkpoint-9" / MANIFEST_FILE).unlink()
    assert checked(run / "checkpoint-9", is_auto=True) == run / "checkpoint-8"
    (line,) = (message for message in caplog.messages if "going on from" in message)
    assert f"because {run / 'checkpoint-9'} has no {MANIFEST_FILE}, so nothing in it can be checked" in line
    assert checked(run / "checkpoint-9", is_auto=False) == run / "checkpoint-9"
    (last / STATE_FILE).unlink()
    assert resumed("auto", str(run.parent), run.name) == run / "checkpoint-8"
    (run / "checkpoint-8" / SHARDS).unlink()
    with pytest.raises(CheckpointError, match=f"No other checkpoint of {run} is known to be intact"):
        find_checkpoint("auto", str(run.parent), run.name)


def test_auto_names_a_newer_run_that_got_another_folder(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One with more steps, or that was saved later; others are not, and no folder of another name."""
    for name in ("run-2", "run-two", "run-2-2"):
        write(run.parent / name / "checkpoint-11")
    os.utime(run.parent / "run-2" / "checkpoint-11" / STATE_FILE, (0, 0))
    find_checkpoint("auto", str(run.parent), run.name)
    told = f"resume=auto takes {run / 'checkpoint-10'}, but {run}-2/checkpoint-11 is newer"
    assert told in caplog.text and caplog.text.count("resume=auto takes") == 1
    caplog.clear()
    (run.parent / "run-2" / "checkpoint-11").rename(run.parent / "run-2" / "checkpoint-3")
    os.utime(run.parent / "run-2" / "checkpoint-3" / STATE_FILE)
    find_checkpoint("auto", str(run.parent), run.name)
    assert f"but {run}-2/checkpoint-3 is newer" in caplog.text
    caplog.clear()
    os.utime(run.parent / "run-2" / "checkpoint-3" / STATE_FILE, (0, 0))
    find_checkpoint("auto", str(run.parent), run.name)
    assert "is newer" not in caplog.text


def test_auto_says_which_later_folder_is_no_checkpoint(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy that broke off is not trained on, nor passed over without a word; what is older is nobody's concern."""
    (run / "checkpoint-3").mkdir()
    (run / "checkpoint-30").mkdir()
    (run / "checkpoint-30" / "config.json").write_text("{}")
    assert resumed("auto", str(run.parent), run.name) == run / "checkpoint-10"
    passed = [line for line in caplog.messages if "is ignored: it has neither" in line]
    assert [line.partition(" is ignored")[0] for line in passed] == [
        f"{run / name}" for name in ("checkpoint-12", "checkpoint-30")
    ]


def test_resume_of_a_folder(run: Path) -> None:
    assert resumed(None, str(run.parent), run.name) is None
    assert resumed(str(run / "checkpoint-9"), "elsewhere", None) == run / "checkpoint-9"
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        find_checkpoint(str(run), "elsewhere", None)
    (run / "checkpoint-9" / STATE_FILE).write_text(json.dumps({"global_step": 9})[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        find_checkpoint(str(run / "checkpoint-9"), "elsewhere", None)


HERE = Owner.here()
ELSEWHERE = {
    "container": replace(HERE, namespace=HERE.namespace + 1),
    "machine": replace(HERE, kernel="another", host="node-7.x"),
}


def left(run: Path, owner: Owner | int) -> list[Path]:
    """What a process leaves that is killed between two renames: the old checkpoint is moved away, the new one not there
    yet; and one that was begun."""
    token = owner if isinstance(owner, int) else owner.token
    folders = [run / f".checkpoint-3.{token}.old", run / f".checkpoint-4.{token}.tmp", run / f".best.{token}.tmp"]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / STATE_FILE).write_text(json.dumps({"global_step": 3, "num_tokens": 0, "sampler": {}}))
    return folders


@pytest.mark.parametrize("kind", ["gone", "pid used again", "earlier version"])
def test_what_a_killed_process_left_is_cleared_up(tmp_path: Path, kind: str) -> None:
    gone = ended_owner()
    owner = {"gone": gone, "pid used again": replace(HERE, started=HERE.started - 1), "earlier version": gone.pid}[kind]
    left(tmp_path, owner)
    assert newest(tmp_path) == tmp_path / "checkpoint-3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]


@pytest.mark.parametrize("owner", [HERE, HERE.pid, *ELSEWHERE.values()], ids=["alive", "earlier", *ELSEWHERE])
def test_what_may_be_alive_is_left_alone(tmp_path: Path, owner: Owner | int) -> None:
    folders = left(tmp_path, owner)
    assert newest(tmp_path) is None
    assert sorted(tmp_path.iterdir()) == sorted(folders)


@pytest.mark.parametrize("owner", ELSEWHERE.values(), ids=ELSEWHERE)
def test_whoever_has_the_run_folder_clears_up_what_others_left(tmp_path: Path, owner: Owner) -> None:
    """Its checkpoints alone: what has another name may be any Trainer's save()."""
    *_, other = left(tmp_path, owner)
    assert newest(tmp_path, is_ours=True) == tmp_path / "checkpoint-3"
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "checkpoint-3"]


def test_what_is_being_written_tells_whose_it_is(folder: Path) -> None:
    seen: list[str] = []
    write_checkpoint(folder, lambda target: seen.append(target.name), {}, {"global_step": 4})
    assert seen == [f".checkpoint-4.{Owner.here().token}.tmp"]
