"""What a run tells: nothing before it begins, everything after; and what a step cost."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch, store
from hybrid_rl.checkpoint.owners import LOCK_FILE, FolderLock, Owner
from hybrid_rl.checkpoint.reading import Checkpoint
from hybrid_rl.config import TrainerConfig, load_config, resolve, to_dict
from hybrid_rl.errors import ConfigError, HybridRLError
from hybrid_rl.logging.run_folder import read_jsonl
from hybrid_rl.logging.run_log import RunLog, cost_metrics
from hybrid_rl.metrics.metric_sums import Timings

HERE = Owner.here()
GONE = (HERE.host, HERE.kernel, HERE.namespace, HERE.pid, HERE.started + 1)  # its number is used again


def config(folder: Path, **keys: Any) -> TrainerConfig:
    return resolve(*load_config({"output_dir": str(folder), "run_name": "run", "max_steps": 5, **keys}))


def saved(folder: Path, step: int, **state: Any) -> Checkpoint:
    return Checkpoint(folder / f"checkpoint-{step}", {"global_step": step, **state})


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def run_until(folder: Path, step: int) -> Path:
    """A run with records of steps 0 to `step` and a checkpoint of step 2."""
    log = RunLog(config(folder, seed=1), 5, None)
    log.begin(0)
    for number in range(step + 1):
        log.metrics(number, {"reward": float(number)})
    (log.path / "samples-rank1.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(step + 1)))
    (log.path / "checkpoint-2").mkdir()
    log.stop()
    log.close()
    return log.path


# ------------------------------------------------------------------------------------------------------- the folder


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    log = RunLog(config(tmp_path), 5, None)
    assert set(files(log.path)) == {"config.yaml"}  # so that nobody else takes the name meanwhile
    log.close()
    assert list(tmp_path.iterdir()) == []
    log.close()


def test_what_ranks_wrote_before_the_start_failed_stays(tmp_path: Path) -> None:
    """Their logs say why."""
    log = RunLog(config(tmp_path), 5, None)
    (log.path / "logs").mkdir()
    (log.path / "logs" / "policy-rank0.log").write_text("no such device")
    log.close()
    assert set(files(log.path)) == {"logs/policy-rank0.log"}


def test_a_run_that_began_keeps_its_folder(tmp_path: Path) -> None:
    log = RunLog(config(tmp_path, seed=7), 5, None)
    log.begin(0)
    log.close()
    again, given = load_config(log.path / "config.yaml")
    assert again == config(tmp_path, seed=7) and "seed" in given


@pytest.mark.parametrize("resume", ["a folder", "auto"])
def test_a_resumed_run_that_cannot_start_changes_nothing(tmp_path: Path, resume: str) -> None:
    folder = run_until(tmp_path, 4)
    before = files(folder)
    resume = "auto" if resume == "auto" else str(folder / "checkpoint-2")
    log = RunLog(config(tmp_path, seed=2, resume=resume), 5, saved(folder, 2))
    assert log.path == folder
    log.close()
    assert files(folder) == before


def test_a_resumed_run_that_starts_drops_the_later_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_until(tmp_path, 4)
    monkeypatch.setattr("hybrid_rl.extras.pictures.curves.draw", lambda *_: pytest.fail("there is nothing new to draw"))
    before = files(folder)
    log = RunLog(config(tmp_path, seed=2, resume="auto"), 5, saved(folder, 2))
    log.begin(2)
    log.stop()
    assert files(folder) == before  # it was only looked at
    log.metrics(3, {"reward": 9.0})
    log.close()
    assert [record["step"] for record in read_jsonl(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert load_config(folder / "config.yaml")[0].seed == 2


def branched(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """A run with checkpoints and rollouts of steps 1 to 4, of which one of step 3 was set aside before; and what has
    to be there once a training from step 2 begins to write."""
    path = run_until(folder, 4)
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-3.abandoned", "checkpoint-10"):
        (path / name).mkdir(exist_ok=True)
        (path / name / "trainer_state.json").write_text(name)
    (path / "rollouts").mkdir()
    for step in range(1, 5):
        (path / "rollouts" / f"step-{step:06d}-rank-0000-of-0001.safetensors").write_text(str(step))
    left = path / f".checkpoint-4.{Owner(*GONE).token}.old"
    left.mkdir()
    (left / "trainer_state.json").write_text("checkpoint-4")
    before = files(path)
    expected = {
        name: before[name] for name in before if not name.startswith((".checkpoint", "config", "metrics", "sam"))
    }
    for old, new in {"3": "3.abandoned-2", "10": "10.abandoned"}.items():
        expected[f"checkpoint-{new}/trainer_state.json"] = expected.pop(f"checkpoint-{old}/trainer_state.json")
    expected["checkpoint-4.abandoned/trainer_state.json"] = b"checkpoint-4"
    for step in (3, 4):
        name = f"rollouts/step-{step:06d}-rank-0000-of-0001.safetensors"
        expected[f"{name}.dropped"] = expected.pop(name)
    for name in ("metrics.jsonl", "samples-rank1.jsonl"):
        lines = before[name].splitlines(keepends=True)
        expected[name], expected[f"{name}.dropped"] = b"".join(lines[:3]), b"".join(lines[3:])
    return path, expected


def test_what_another_branch_left_is_set_aside_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, expected = branched(tmp_path)
    log = RunLog(config(tmp_path, resume=str(folder / "checkpoint-2")), 5, saved(folder, 2))
    log.begin(2)
    assert caplog.text == ""
    log.take_up()
    log.take_up()
    log.close()
    assert {name: data for name, data in files(folder).items() if name != "config.yaml"} == expected
    names = "checkpoint-3.abandoned-2, checkpoint-4.abandoned, checkpoint-10.abandoned"
    assert (
        caplog.text.count(f"training continues from step 2, so checkpoints of another branch are set aside: {names}")
        == 1
    )
    assert caplog.text.count("the existing records of 2 later steps are moved to metrics.jsonl.dropped") == 1


def test_a_run_that_is_killed_while_it_sets_aside_goes_on_as_if_it_were_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before every single change of a file, and started again."""

    class Killed(BaseException):
        pass

    def dies_at(number: int, calls: list[int], patch: pytest.MonkeyPatch) -> None:
        for name in ("rename", "replace", "write_bytes"):
            original = getattr(Path, name)

            def counts(path: Path, *arguments: Any, original: Any = original) -> Any:
                calls.append(0)
                if len(calls) == number:
                    raise Killed
                return original(path, *arguments)

            patch.setattr(Path, name, counts)

    number, is_through = 0, False
    while not is_through and number < 50:
        number += 1
        folder, expected = branched(tmp_path / str(number))
        for attempt in range(2):
            keys = {"resume": str(folder / "checkpoint-2")}
            log = RunLog(config(tmp_path / str(number), **keys), 5, saved(folder, 2))
            log.begin(2)
            with monkeypatch.context() as patch, contextlib.suppress(Killed):
                if attempt == 0:
                    dies_at(number, [], patch)
                log.take_up()
                is_through |= attempt == 0
            log.close()
        found = {name: data for name, data in files(folder).items() if not name.startswith((".", "config.yaml"))}
        assert found == expected, number
    assert number > 10


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("gone", "the file is missing"),
        ("cut", "cannot parse"),
        ("text", "the file has no configuration key"),
        ("empty", "the file has no configuration key"),
    ],
)
def test_a_config_that_cannot_be_read_is_told(
    tmp_path: Path, damage: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_until(tmp_path, 2)
    texts = {"text": ":::{", "empty": "", "cut": "report_to: [wand"}
    (folder / "config.yaml").unlink()
    if damage in texts:
        (folder / "config.yaml").write_text(texts[damage])
    log = RunLog(config(tmp_path, seed=9, resume="auto"), 5, saved(folder, 2))
    log.begin(2)
    assert f"{folder / 'config.yaml'}: {told}" in caplog.text
    log.take_up()
    log.close()
    assert load_config(folder / "config.yaml")[0].seed == 9
    assert damage == "gone" or (folder / "config.yaml.dropped").read_text() == texts[damage]


def test_lines_that_cannot_be_read_are_told_as_what_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run_until(tmp_path, 2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    log = RunLog(config(tmp_path, resume="auto"), 5, saved(folder, 2))
    log.begin(2)
    log.metrics(3, {"reward": 9.0})
    log.close()
    assert "1 unreadable line of metrics.jsonl was removed, and kept in metrics.jsonl.dropped" in caplog.text
    assert "the records of" not in caplog.text
    assert (folder / "metrics.jsonl.dropped").read_text() == '{"step": 3, "lo\n'


def test_a_name_that_is_taken_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_until(tmp_path, 1)
    assert "run folder" not in capsys.readouterr().err
    log = RunLog(config(tmp_path), 5, None)
    assert capsys.readouterr().err == f"the run folder is {folder}-2, because {folder} exists\n"
    log.close()


def test_auto_without_a_checkpoint_takes_the_folder_of_its_name(tmp_path: Path) -> None:
    """A job that died before its first checkpoint begins again under the same name; if it cannot, existing files stay,
    and no new ones are left."""
    log = RunLog(config(tmp_path, resume="auto"), 5, None)
    log.close()
    assert list(tmp_path.iterdir()) == []
    folder = run_until(tmp_path, 1)
    before = files(folder)
    RunLog(config(tmp_path, resume="auto"), 5, None).close()
    assert files(folder) == before
    log = RunLog(config(tmp_path, resume="auto"), 5, None)
    assert not log.begin(0)
    log.metrics(0, {"reward": 7.0})
    log.close()
    assert [(line["step"], line["reward"]) for line in read_jsonl(folder / "metrics.jsonl")] == [(0, 7.0)]  # once


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_time_before_the_first_step_is_recorded_once(tmp_path: Path, is_recorded: bool) -> None:
    """A checkpoint of step 0 may be older or newer than the record of it."""
    folder = run_until(tmp_path, 1 if is_recorded else -1)
    (folder / "checkpoint-0").mkdir()
    log = RunLog(config(tmp_path, resume="auto"), 5, saved(folder, 0))
    assert log.begin(0) == is_recorded
    log.close()


# -------------------------------------------------------------------------------------------------- one run, one folder


def test_a_folder_that_another_run_has_is_refused(tmp_path: Path) -> None:
    log = RunLog(config(tmp_path), 5, None)
    with pytest.raises(ConfigError, match=r"run is in use by process \d+ on .* choose another run_name"):
        RunLog(config(tmp_path, resume="auto"), 5, None)
    log.close()
    RunLog(config(tmp_path, resume="auto"), 5, None).close()


def test_a_folder_that_was_taken_over_is_left_alone(tmp_path: Path) -> None:
    log = RunLog(config(tmp_path), 5, None)
    log.begin(0)
    (log.path / LOCK_FILE).unlink()
    other = FolderLock(log.path)
    with pytest.raises(HybridRLError, match="was taken over by process"):
        log.metrics(1, {"reward": 1.0})
    assert read_jsonl(log.path / "metrics.jsonl") == []
    log.close()
    other.check()  # it still has it
    other.release()


@pytest.mark.parametrize("what", ["config.yaml", "folder"])
def test_what_a_later_resume_goes_by_is_written_again(tmp_path: Path, what: str) -> None:
    """Without its config.yaml a checkpoint in the folder would not be of that run."""
    log = RunLog(config(tmp_path, seed=7), 5, None)
    log.begin(0)
    if what == "folder":
        shutil.rmtree(log.path)
    else:
        (log.path / "config.yaml").unlink()
    log.metrics(1, {"reward": 1.0})
    assert load_config(log.path / "config.yaml")[0].seed == 7 and len(read_jsonl(log.path / "metrics.jsonl")) == 1
    with pytest.raises(ConfigError, match="is in use"):
        FolderLock(log.path)
    log.close()


def test_a_run_whose_config_was_lost_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = run_until(tmp_path, 4)
    (folder / "config.yaml").unlink()
    for resume in ("auto", str(folder / "checkpoint-2")):
        log = RunLog(config(tmp_path, resume=resume), 5, saved(folder, 2))
        assert log.path == folder
        log.close()
    (folder / "metrics.jsonl").unlink()
    assert RunLog(config(tmp_path, resume=resume), 5, saved(folder, 2)).path == folder  # by run_name


def test_a_checkpoint_elsewhere_begins_a_folder_of_its_own(tmp_path: Path) -> None:
    """No run that could continue is beside it."""
    kept = tmp_path / "kept" / "checkpoint-2"
    kept.mkdir(parents=True)
    log = RunLog(config(tmp_path / "runs", resume=str(kept)), 5, Checkpoint(kept, {"global_step": 2}))
    assert log.path == tmp_path / "runs" / "run"
    log.close()
    assert files(tmp_path / "kept") == {} and list((tmp_path / "runs").iterdir()) == []


# --------------------------------------------------------------------------------------------------------- the records


def test_trackers_start_with_the_run_and_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Tracker:
        def __init__(self, report_to: list[str], folder: Path, config: dict[str, Any], first_step: int) -> None:
            calls.append((report_to, folder.name, config["seed"], first_step))

        def table(self, step: int, samples: list[dict[str, Any]]) -> None:
            calls.append((step, samples))

        def log(self, step: int) -> None:
            calls.append(step)

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setattr("hybrid_rl.extras.trackers.trackers.Trackers", Tracker)
    log = RunLog(config(tmp_path, report_to=["none"], seed=3), 5, None)
    assert calls == []
    log.begin(0)
    log.metrics(1, {"reward": 1.0})
    log.close()
    assert calls == [(["none"], "run", 3, 0), (1, []), 1, "closed"]


def test_samples_in_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(config(tmp_path), 5, None)
    record = {"step": 1, "group": 0, "turn": 0, "rewards": {}}
    first = {**record, "trajectory": 0, "prompt": "1+1=", "completion": "two", "reward": 0.5}
    second = {**record, "trajectory": 1, "prompt": "2+1=", "completion": "three", "reward": None}
    log.begin(0)
    log.display.start(0)
    log.samples([first, second])
    assert capsys.readouterr().err == ""
    log.metrics(1, {"reward": 0.5})
    log.stop()
    log.close()
    shown = [line for line in capsys.readouterr().err.splitlines() if line]
    assert shown[0].startswith("step 1/5") and shown[1].startswith("-- step 1, prompt 0, sample 0  reward 0.5")
    assert shown[2].split() == ["prompt", "1+1="] and shown[3].split() == ["completion", "two"]
    assert shown[4].endswith("sample 1  reward masked")


# -------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_a_step_cost(is_kept: bool) -> None:
    """From [N]-sized columns, wherever the samples are."""
    lengths = {"prompt_length": torch.tensor([3, 5]), "completion_length": torch.tensor([10, 2])}
    batch = Batch({**lengths, "prompt": ["a", "b"]})
    timings = Timings()
    timings.add("rollout", 2.0)
    timings.add("update", 1.0)
    assert cost_metrics(store(batch, lambda block: block) if is_kept else batch, timings, 4.0, 4e9, 3) == {
        "timing/rollout": 2.0,
        "timing/update": 1.0,
        "timing/step": 4.0,
        "step_time": 4.0,
        "perf/rollout_tokens_per_second": 6.0,
        "perf/tokens_per_second": 5.0,
        "perf/samples_per_second": 0.5,
        "perf/rollout_gflops": 2.0,
        "perf/update_gflops": 12.0,
    }


@pytest.mark.parametrize(("held", "lines"), [([3, 4], 1), ([], 0)])
def test_a_resume_says_that_held_groups_keep_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: list[int], lines: int
) -> None:
    folder = run_until(tmp_path, 2)
    before = to_dict(config(tmp_path, max_completion_length=40))
    checkpoint = saved(folder, 2, config=before, collector={"held": held})
    log = RunLog(config(tmp_path, max_completion_length=4), 5, checkpoint)
    shown: list[str] = []
    monkeypatch.setattr(log.display, "message", shown.append)
    log.announce_resume(checkpoint)
    log.close()
    assert shown.count("2 held groups will finish under the old max_completion_length") == lines
