"""Checkpoints that are written while training goes on, and disks that fail under a run."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Callback, RunStopped
from hybrid_rl.checkpoint import snapshot
from hybrid_rl.checkpoint.manifest import STATE_FILE, check_checkpoint
from hybrid_rl.checkpoint.reading import read_state
from hybrid_rl.errors import CheckpointError
from tests.support.inside.trainers import log_of, saver_of
from tests.support.tiny import spread

pytestmark = pytest.mark.slow  # the file as a whole


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Checkpoints in the background are not written before it is set."""
    event, write = threading.Event(), Snapshot.write

    def waiting(self: Any, *arguments: Any) -> Any:
        assert event.wait(120)
        return write(self, *arguments)

    monkeypatch.setattr(Snapshot, "write", waiting)
    yield event
    event.set()


Snapshot = snapshot.Snapshot


def files_of(folder: Path) -> dict[str, Any]:
    """The content of each file; of tensors without the order of metadata, which safetensors leaves to chance."""
    found: dict[str, Any] = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for name in [name for name in found if name.endswith(".safetensors")]:
        end = 8 + int.from_bytes(found[name][:8], "little")
        found[name] = (json.loads(found[name][8:end]), found[name][end:])
    return found


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint*"))


class After(Callback):
    """Does something after a step."""

    def __init__(self, **actions: Callable[[Any], object]) -> None:
        self._actions = actions

    def on_step_end(self, trainer: Any, step: int, batch: Any, metrics: Any) -> None:
        self._actions.get(f"step_{step}", lambda _: None)(trainer)


def test_a_checkpoint_is_that_of_its_step_though_training_went_on(make_trainer, gate, records) -> None:
    """Byte for byte what a run that waits has written, but for the key that says so."""
    waits = make_trainer(max_steps=4, save_steps=2, async_save=False, run_name="waits")
    waits.fit()
    seen: list[list[str]] = []

    def look(trainer: Any) -> None:
        seen.append(checkpoints(trainer.run_folder))
        threading.Timer(0.5, gate.set).start()  # the last step waits for the one of step 2, and for its own

    trainer = make_trainer(max_steps=4, save_steps=2, run_name="goes-on", callbacks=[After(step_3=look)])
    trainer.fit()
    assert len(seen) == 1 and len(seen[0]) == 1 and seen[0][0].startswith(".checkpoint-2.")
    assert checkpoints(trainer.run_folder) == ["checkpoint-2", "checkpoint-4"]
    for name in checkpoints(trainer.run_folder):
        check_checkpoint(trainer.run_folder / name)
        found, expected = (files_of(one.run_folder / name) for one in (trainer, waits))
        differing = {file for file in found.keys() | expected.keys() if found.get(file) != expected.get(file)}
        assert differing == {STATE_FILE, "manifest.json"}
        states = [read_state(one.run_folder / name) for one in (trainer, waits)]
        for state in states:
            del state["config"], state["best"]
        assert states[0] == states[1]
    lines = {line["step"]: line for line in records(trainer)}
    assert "timing/checkpoint" not in lines[2] and lines[3]["timing/checkpoint"] > 0
    resumed = make_trainer(max_steps=5, save_steps=2, run_name="goes-on", resume="auto")
    assert resumed.global_step == 4


def test_callbacks_and_metrics_learn_of_it_when_it_is_there(make_trainer, gate, records) -> None:
    seen: list[tuple[int, int, bool]] = []

    class Watch(Callback):
        def on_save(self, trainer: Any, step: int, folder: Path) -> None:
            seen.append((step, trainer.global_step, (folder / STATE_FILE).is_file()))

    def save(trainer: Any) -> None:
        assert seen == []
        gate.set()
        assert trainer.save().name == "checkpoint-3"  # by the user: waits for both
        assert seen == [(2, 3, True), (3, 3, True)]

    trainer = make_trainer(max_steps=4, save_steps=2, callbacks=[Watch(), After(step_3=save)])
    trainer.fit()
    assert seen[2:] == [(4, 4, True)]
    assert records(trainer)[-1]["timing/checkpoint_write"] > 0


def test_a_failure_in_the_background_is_told_once_and_tried_again(make_trainer, caplog) -> None:
    patch = pytest.MonkeyPatch()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def wait(trainer: Any) -> None:
        saver_of(trainer).wait()

    def mend(trainer: Any) -> None:
        wait(trainer)
        patch.undo()

    patch.setattr(snapshot, "sync", full)
    trainer = make_trainer(max_steps=6, save_steps=2, callbacks=[After(step_2=wait, step_3=mend)])
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        trainer.fit()
    told = [line for line in caplog.messages if "trying again after the next step" in line]
    assert len(told) == 1 and "checkpoint-2: OSError: [Errno 28] No space left" in told[0]
    assert checkpoints(trainer.run_folder) == ["checkpoint-4", "checkpoint-6"]


def test_without_memory_for_a_copy_training_waits_and_says_so_once(make_trainer, monkeypatch, caplog) -> None:
    monkeypatch.setattr(snapshot, "available_host_bytes", lambda: 1000)
    trainer = make_trainer(max_steps=3, save_steps=1)
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        trainer.fit()
    assert checkpoints(trainer.run_folder) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    told = [line for line in caplog.messages if "not written in the background" in line]
    assert len(told) == 1 and "of 1.00 kB that are available" in told[0]


def test_ctrl_c_waits_for_what_is_being_written(make_trainer, gate) -> None:

    def breaks(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 4:
            threading.Timer(0.5, gate.set).start()
            raise KeyboardInterrupt
        return spread(completion_ids)

    trainer = make_trainer(reward_funcs=breaks, max_steps=6, save_steps=3)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert checkpoints(trainer.run_folder) == ["checkpoint-3"]
    check_checkpoint(trainer.run_folder / "checkpoint-3")


KILLED = """
import json, os, signal, sys, threading
from hybrid_rl import Trainer
from hybrid_rl.checkpoint import snapshot
from tests.support.tiny import build_model, build_tokenizer, spread, sums

trainer = Trainer(build_model(), spread, sums(12), tokenizer=build_tokenizer(), **json.loads(sys.argv[1]))
trainer.step()
trainer.step()
write, began = snapshot.save_tensors, threading.Event()

def hangs(*arguments):
    write(*arguments)
    began.set()
    threading.Event().wait()

snapshot.save_tensors = hangs
threading.Thread(target=lambda: (began.wait(), os.kill(os.getpid(), signal.SIGKILL))).start()
trainer.fit()
"""


def test_a_kill_in_the_middle_of_a_write_leaves_the_checkpoint_before(forked, make_trainer, tmp_path) -> None:
    keys = {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 5, "run_name": "run"}
    keys |= {"max_steps": 6, "save_steps": 2, "output_dir": str(tmp_path), "learning_rate": 1e-2}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run("-c", KILLED, json.dumps(keys), environment=environment)
    assert done.returncode == -9
    left = checkpoints(tmp_path / "run")
    assert len(left) == 2 and left[0].startswith(".checkpoint-4.") and left[1] == "checkpoint-2"
    resumed = make_trainer(**keys, resume="auto")
    assert resumed.global_step == 2
    assert checkpoints(resumed.run_folder) == ["checkpoint-2"]


# ------------------------------------------------------------------------------------------------------------ disks


class Disk:
    """A small disk that can become full, read-only or gone."""

    def __init__(self, root: Path) -> None:
        self.place, self._store = root / "disk", root / "store"
        self.place.mkdir()
        self._store.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", str(self._store))
        self._mount("--bind", str(self._store), str(self.place))

    def _mount(self, *arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)

    def fail(self, how: str) -> None:
        if how == "full":
            with (self._store / "ballast").open("wb", buffering=0) as file:
                try:
                    while file.write(b"x" * 4096):
                        pass
                except OSError:
                    pass
        elif how == "read-only":
            # On top: what is open for writing keeps a disk from being made read-only.
            self._mount("--bind", str(self._store), str(self.place))
            self._mount("-o", "remount,bind,ro", str(self.place))
        else:
            subprocess.run(["umount", "-l", str(self.place)], check=True)

    def mend(self, how: str) -> None:
        if how == "full":
            (self._store / "ballast").unlink()
        elif how == "read-only":
            subprocess.run(["umount", "-l", str(self.place)], check=True)
        else:
            self._mount("--bind", str(self._store), str(self.place))

    def close(self) -> None:
        for path in (self.place, self.place, self._store):  # one may lie on the other
            subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    made = None
    try:
        made = Disk(tmp_path)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine allows no mounts: {error}")
    yield made
    made.close()


@pytest.mark.parametrize("is_async", [True, False], ids=["background", "blocking"])
@pytest.mark.parametrize("how", ["full", "read-only", "gone"])
def test_training_outlives_a_disk(make_trainer: Callable[..., Any], disk, caplog, records, how, is_async) -> None:
    """Steps 3 and 4 find no disk; everything is there in the end, and each file is warned of once."""

    def fail(trainer: Any) -> None:
        saver_of(trainer).wait()
        disk.fail(how)

    def mend(trainer: Any) -> None:
        saver_of(trainer).wait()
        disk.mend(how)

    keys: dict[str, Any] = {"save_steps": 2, "max_steps": 6, "run_name": "run", "async_save": is_async}
    keys |= {
        "save_rollouts": True,
        "output_dir": str(disk.place),
        "callbacks": [After(step_2=fail, step_4=mend)],
        "report_to": [],
    }
    with caplog.at_level(logging.WARNING, logger="hybrid_rl"):
        trainer = make_trainer(**keys)
        trainer.fit()
    assert [line["step"] for line in records(trainer) if line["step"]] == [1, 2, 3, 4, 5, 6]
    samples = records(trainer, name="samples.jsonl")
    assert sorted({line["step"] for line in samples}) == [1, 2, 3, 4, 5, 6] and len(samples) == 6 * 8
    left = [name for name in checkpoints(trainer.run_folder) if not name.endswith("-5")]
    assert left == ["checkpoint-2", "checkpoint-6"]
    for path in trainer.run_folder.glob("checkpoint-*"):
        check_checkpoint(path)
    about = [line.partition(" (")[0] for line in caplog.messages if line.startswith("cannot write ")]
    assert len(about) == len(set(about))
    told = caplog.text.count("trying again after the next step")
    assert told == 1
    assert caplog.text.count("is not saved, nor are those that follow") == 1
    assert make_trainer(**keys | {"callbacks": []}, resume="auto").global_step == 6


def test_records_that_waited_for_a_disk_come_with_a_save_after_the_end(make_trainer, disk, records) -> None:
    """As the error that the end of `fit()` raises advises."""

    def fail(trainer: Any) -> None:
        saver_of(trainer).wait()
        disk.fail("full")

    keys: dict[str, Any] = {"save_steps": 1, "max_steps": 4, "run_name": "run", "output_dir": str(disk.place)}
    trainer = make_trainer(**keys, callbacks=[After(step_2=fail)], report_to=[])
    with pytest.raises(CheckpointError):
        trainer.fit()
    disk.mend("full")
    trainer.save()
    assert [line["step"] for line in records(trainer) if line["step"]] == [1, 2, 3, 4]
    assert sorted({line["step"] for line in records(trainer, name="samples.jsonl")}) == [1, 2, 3, 4]


def test_a_stop_whose_last_step_finds_no_room_ends_with_an_earlier_checkpoint(make_trainer, disk, monkeypatch) -> None:
    def stop(trainer: Any) -> None:
        saver_of(trainer).wait()
        disk.fail("full")
        signal.raise_signal(signal.SIGTERM)

    keys: dict[str, Any] = {"save_steps": 2, "max_steps": 6, "run_name": "run", "output_dir": str(disk.place)}
    trainer = make_trainer(**keys, callbacks=[After(step_3=stop)], report_to=[], enable_jit_checkpoint=True)
    told: list[str] = []
    monkeypatch.setattr(log_of(trainer).display, "message", told.append)
    with pytest.raises(RunStopped) as raised:
        trainer.fit()
    disk.mend("full")
    assert raised.value.code == 75 and "that step is not saved: cannot write checkpoint" in told[-1]
    assert "checkpoint-2" in told[-1].partition("resume from")[2]
    assert checkpoints(trainer.run_folder) == ["checkpoint-2"]
