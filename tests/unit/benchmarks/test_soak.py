"""The long run under faults: its schedule, what it makes of its numbers, and a short one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import faults, growth, num_restarts, problems_of, without_folders
from benchmarks.soak_faults import EVERY, FIRST_STEP, claim, draw_schedule, schedule

ROOT = Path(__file__).parents[3]


def test_faults_are_drawn_from_the_seed_as_often_as_they_should_be() -> None:
    drawn = draw_schedule(500, 0, list(EVERY))
    # 500 steps by the steps of EVERY, rounded: 25 + 10 + 17 + 25 + 10 + 12 + 4 + 4 + 2 + 3.
    assert Counter(drawn.values())["reward exception"] == 25 and Counter(drawn.values())["disk full"] == 3
    assert len(drawn) == 112
    assert drawn == draw_schedule(500, 0, list(EVERY)) != draw_schedule(500, 1, list(EVERY))
    assert min(drawn) >= FIRST_STEP and max(drawn) < 499
    short = draw_schedule(20, 0, list(EVERY))
    assert Counter(short.values()) == dict.fromkeys(EVERY, 1)
    few = draw_schedule(7, 0, list(EVERY))
    assert set(few.values()) == {"driver killed", "disk full", "handoff"}  # the rarest, in steps 3, 4 and 5


@pytest.fixture
def due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "schedule.json").write_text(json.dumps({7: "reward hang", 9: "handoff"}))
    (tmp_path / "claims").mkdir()
    monkeypatch.setenv("SOAK_FOLDER", str(tmp_path))
    schedule.cache_clear()
    yield
    schedule.cache_clear()


@pytest.mark.usefixtures("due")
def test_a_fault_comes_once_and_of_a_sample_always() -> None:
    assert not claim("reward hang", 6, "a") and not claim("handoff", 7)
    # The sample that has it first keeps it, however often it is scored again.
    assert [claim("reward hang", 7, text) for text in "abab"] == [True, False, True, False]
    assert [claim("handoff", 9) for _ in range(3)] == [True, False, False]


def line(step: int, **values: Any) -> dict[str, Any]:
    held = dict.fromkeys(("num_threads", "num_descriptors", "num_processes", "num_files"), 5.0)
    return {"step": step, "at": step, "driver": 1, "reward": 0.5, "process_bytes": 1000.0, **held, **values}


def side(record: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    return {"record": record, "faults": [], "warnings": [], "schedule": {}, "statuses": [0], **values}


def test_growth_is_the_median_slope_after_the_first_fifth() -> None:
    record = [line(step, process_bytes=1000.0 + step) for step in range(1, 11)]
    record[6]["process_bytes"] = 9000.0  # a jump is no growth
    # Of steps 3 to 10 the values are 1003 to 1010, of which one is 9000: their median is 1006.5 or a neighbour.
    found = growth(record, "process_bytes", 10)
    assert found == {"median": 1007.0, "per_step": 1.0, "share": pytest.approx(10 / 1007.0)}
    # Every second step was looked at: a slope of 1 per step is 2 per look.
    found = growth([one for one in record if one["step"] % 2 == 0], "process_bytes", 10)
    assert found["per_step"] == 1.0
    # What was trained again counts once, as it was in the end.
    again = [line(10, process_bytes=1010.0, at=99)]
    assert growth([*record[:9], line(10, process_bytes=5.0), *again], "process_bytes", 10)["per_step"] == 1.0


def test_warnings_are_told_without_folders() -> None:
    told = without_folders("cannot write /a/run/metrics.jsonl (only 1/2 KiB): see /b/disk: full")
    assert told == "cannot write metrics.jsonl (only 1/2 KiB): see disk: full"


def test_restarts_of_every_driver_count() -> None:
    record = [line(1, restarts=0.0), line(2, restarts=2.0), line(3, restarts=1.0, driver=2), line(4, driver=3)]
    assert num_restarts(record) == 3.0


def test_a_fault_counts_as_seen_if_the_run_tells_of_it() -> None:
    happened = [{"kind": kind, "step": step} for kind, step in (("reward hang", 3), ("reward hang", 3), ("handoff", 4))]
    happened += [{"kind": "driver killed", "step": 5}]
    drawn = {3: "reward hang", 4: "handoff", 5: "driver killed"}
    numbers = {"drawn": 1, "happened": 1}
    record = [line(step) for step in range(1, 7)]
    silent = faults(side(record, faults=happened, schedule=drawn))
    assert silent == {kind: numbers | {"seen": 0} for kind in drawn.values()}
    record[2]["rewards/num_failed"] = 1.0
    warnings = ["after training step 3: HandoffError: asked to fail. Restart 1"]
    told = faults(side(record, faults=happened, schedule=drawn, warnings=warnings, statuses=[-9, 0]))
    assert told == {kind: numbers | {"seen": 1} for kind in drawn.values()}


def test_what_does_not_hold_is_said() -> None:
    plain = side([line(step) for step in range(1, 11)])
    good = side([line(step) for step in range(1, 11)])
    assert problems_of({"without faults": plain, "with faults": good}, 10) == []
    bad = side([line(step, reward=0.1, num_threads=step) for step in range(1, 11)], schedule={3: "handoff"})
    assert problems_of({"without faults": plain, "with faults": bad}, 10) == [
        "with faults: handoff: {'drawn': 1, 'happened': 0, 'seen': 0}",
        "with faults: num_threads grows by 154% of its median over the run",  # 10 of 6.5
        "with faults the reward ends at 0.100, without at 0.500",
    ]
    short = side([line(1)], statuses=[1, 1])
    (problem,) = problems_of({"without faults": plain, "with faults": short}, 10)
    assert problem == "with faults: it did not end well: statuses [1, 1], 1 of 10 steps"


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_a_short_run_survives_each_fault_of_one_process() -> None:
    command = [sys.executable, "benchmarks/soak.py", "--steps", "16", "--ranks", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.stdout, done.stderr[-4000:]
    details = json.loads(done.stdout)["details"]
    told = {kind: numbers["seen"] for kind, numbers in details["with faults"]["faults"].items()}
    assert told == {kind: 1 for kind in EVERY if kind not in details["skipped"]}
    assert details["without faults"]["faults"] == {}
