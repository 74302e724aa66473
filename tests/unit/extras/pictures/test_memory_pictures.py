"""When the pictures of memory are drawn, and that nothing of it ends a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.pictures import memory_picture
from hybrid_rl.extras.pictures.memory_pictures import MemoryPictures, save_trace
from hybrid_rl.memory.comparison import Expected
from hybrid_rl.memory.history import Level, Span, StepMemory
from hybrid_rl.planning.ledger import Budget, Choices, MemoryPlan, PhaseMemory, Share
from tests.support.inside.workers import engine_of

STEP = StepMemory(1.0, 3.0, {"actor": 10}, (Level(2.0, "actor", 0),), (Span("update", 1.0, 2.0),), ())


def plan() -> MemoryPlan:
    """Of an update with two full moments, in which gradients are no resident."""
    residents = (Share("actor", 10, ""), Share("optimizer", 20, ""))
    phases = (
        PhaseMemory("update", (*residents, Share("gradients", 5, "")), moment="backward"),
        PhaseMemory("update", (*residents, Share("updating", 69, "")), moment="optimizer step"),
    )
    return MemoryPlan(1, "cpu", Budget(None, None, 1), Choices((), False, None, 64), phases)


class Ranks:
    """A group whose rank 0 has one step, and counts how often it is asked."""

    has_ended = False

    def __init__(self, error: Exception | None = None) -> None:
        self.num_asked, self._error = 0, error

    def memory_history(self) -> list[list[StepMemory]]:
        self.num_asked += 1
        if self._error is not None:
            raise self._error
        return [[STEP], []]


def test_a_trace_is_written_but_not_of_nothing_or_to_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no training step yet"):
        save_trace([[], []], tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="cannot write .*no/trace.json"):
        save_trace([[STEP]], tmp_path / "no" / "trace.json")
    told = json.loads(save_trace([[STEP], []], tmp_path / "trace.json").read_text())
    assert {event["name"] for event in told["traceEvents"] if event["ph"] in "CX"} == {"memory (bytes)", "update"}


def test_it_is_drawn_after_the_second_step_if_others_are_awake_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    lines: list[Expected | None] = []

    def draw(step: StepMemory, path: Path, *, title: str, expected: Expected | None) -> None:
        assert step is STEP and path == tmp_path / "memory.png"
        drawn.append(title[-7:])
        lines.append(expected)

    monkeypatch.setattr(memory_picture, "draw_memory", draw)
    ranks: Any = Ranks()
    pictures = MemoryPictures(ranks, tmp_path, plan())
    pictures.draw(10)  # fit() with nothing to do
    assert not ranks.num_asked
    sleeps, wakes = {"memory/kv_cache_bytes": 0.0, "reward": 1.0}, {"memory/kv_cache_bytes": 40.0}
    other = {**wakes, "memory/available_bytes": 8.0}  # no resident
    for step, metrics in ((11, sleeps), (12, sleeps), (13, sleeps), (14, wakes), (15, other)):
        pictures.look(step, metrics)
    assert drawn == ["step 12", "step 14"] and ranks.num_asked == 2
    pictures.draw(15)
    pictures.draw(15)
    assert drawn == ["step 12", "step 14", "step 15"] and ranks.num_asked == 3
    assert lines == [plan().expected()] * 3


def test_ranks_compare_residents_and_the_fullest_moment_of_a_phase() -> None:
    assert plan().expected() == Expected({"update": {"actor": 10, "optimizer": 20}}, {"update": 99})


def test_what_prevents_a_picture_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks: Any = Ranks(RuntimeError("a rank is gone"))
    pictures = MemoryPictures(ranks, tmp_path)
    pictures.look(1, {})
    pictures.look(2, {})
    assert "memory.png: RuntimeError: a rank is gone" in caplog.text


def test_phases_of_a_step_have_a_check_if_its_handoff_is_probed(make_trainer: Callable[..., Any]) -> None:
    """The first step has the start's, too: the first three handoffs are probed whatever the schedule says."""
    trainer = make_trainer(max_steps=4, handoff={"probe_steps": 4})
    trainer.fit()
    (steps,) = trainer.policy.memory_history()
    assert [[phase.name for phase in step.phases].count("check") for step in steps] == [2, 1, 0, 1]


def test_a_run_draws_its_second_and_its_last_step_and_writes_a_trace(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, Path, StepMemory]] = []

    def draw(step: StepMemory, path: Path, *, title: str, expected: Expected | None) -> None:
        drawn.append((title, path, step))

    trainer = make_trainer(max_steps=4, handoff={"probe_steps": 0})
    monkeypatch.setattr(memory_picture, "draw_memory", draw)
    trainer.fit()
    titles, paths, steps = zip(*drawn, strict=True)
    told = "residents in memory of rank 0 (its process takes more), training step {}"
    assert list(titles) == [told.format(2), told.format(4)]
    assert set(paths) == {trainer.run_folder / "memory.png"}
    last = steps[-1]
    assert [phase.name for phase in last.phases] == ["generate", "update", "publish"]
    assert [(move.tag, move.awake) for move in last.moves] == [("kv_cache", True), ("kv_cache", False)]
    _, bytes_of = last.series()
    assert bytes_of["kv_cache"] == [engine_of(trainer).kv_cache_bytes, 0, 0]
    assert {tag for tag, row in bytes_of.items() if all(row)} == {"actor", "optimizer"}
    trace = json.loads(trainer.save_memory_trace(tmp_path / "trace.json").read_text())
    durations = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert durations.count("update") == 4
