"""When each part of a step was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.memory.history import Span
from hybrid_rl.run import timeline
from hybrid_rl.run.timeline import Timeline


class Ranks:
    """Two ranks, of which the second has its clock two seconds ahead."""

    has_ended = False

    def last_phases(self) -> list[list[Span]]:
        return [[Span("generate", 100.5, 101.0)], [Span("generate", 102.5, 103.25)]]


def test_parts_are_told_from_the_start_of_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 100.0, 100.25, 101.5, 101.5, 104.0, 105.0])
    monkeypatch.setattr(timeline.time, "time", lambda: next(clock))
    ranks: Any = Ranks()
    line = Timeline(ranks, tmp_path)
    with line.phase("evaluation"):  # outside of steps: nothing is noted
        pass
    with line.step(3):
        with line.phase("rollout"):
            pass
        with line.phase("update"):
            pass
    assert json.loads((tmp_path / "timeline.jsonl").read_text()) == {
        "step": 3,
        "start": 100.0,
        "seconds": 5.0,
        "phases": [["rollout", 0.25, 1.25], ["update", 1.5, 2.5]],
        "ranks": [[["generate", 0.5, 0.5]], [["generate", 2.5, 0.75]]],
    }


def test_a_step_that_fails_has_no_record(tmp_path: Path) -> None:
    ranks: Any = Ranks()
    line = Timeline(ranks, tmp_path)
    with pytest.raises(KeyError), line.step(1), line.phase("rollout"):
        raise KeyError
    assert not (tmp_path / "timeline.jsonl").exists()


def test_a_run_writes_what_a_report_needs(make_trainer: Callable[..., Any]) -> None:
    """Every part lies within its step, none overlaps the next, and the phases of the rank lie within the driver's."""
    trainer = make_trainer(max_steps=2)
    trainer.fit()
    records = [json.loads(line) for line in (trainer.run_folder / "timeline.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        names = [name for name, _, _ in record["phases"]]
        assert names[:5] == ["rollout", "logprobs", "advantages", "update", "handoff"]
        ends = [start + length for _, start, length in record["phases"]]
        starts = [start for _, start, _ in record["phases"]]
        assert all(end <= later + 1e-5 for end, later in zip(ends, starts[1:], strict=False))
        assert ends[-1] <= record["seconds"] + 1e-5
        driver = {name: (start, start + length) for name, start, length in record["phases"]}
        rank = {name: (start, start + length) for name, start, length in record["ranks"][0]}
        for its, name in (("generate", "rollout"), ("update", "update"), ("publish", "handoff")):
            assert driver[name][0] - 1e-3 <= rank[its][0] and rank[its][1] <= driver[name][1] + 1e-3
    assert records[1]["start"] >= records[0]["start"] + records[0]["seconds"] - 1e-3
    samples = [json.loads(line) for line in (trainer.run_folder / "samples.jsonl").read_text().splitlines()]
    shown = [sample["token_values"] for sample in samples if "token_values" in sample]
    assert len(shown) == 8  # four a step
    for values in shown:
        assert values["trainer_logprob"] == pytest.approx(values["logprob"], abs=1e-4)
        assert all(0 < entropy < 8 for entropy in values["entropy"])
        assert len({len(column) for column in values.values()}) == 1
    assert all("advantage" in sample and "answer" in sample.get("row", {}) for sample in samples)
    about = json.loads((trainer.run_folder / "environment.json").read_text())
    assert "max_steps" in about["given"] and about["model"]["num_parameters"] > 0
