"""The whole cycle of memory on two ranks, with an engine that really sleeps: by the table at every moment, and a run
whose trainer's side moves is to the bit the run in which all of it stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from tests.memory_runs import CASES, compare, folders, watched_run
from tests.memory_watch import Recorder, slope
from tests.no_pictures import draw_nothing
from tests.sleeping_engine import sleeping_engine

pytestmark = pytest.mark.slow  # processes are started


@pytest.fixture
def make(tmp_path: Path, forked_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainer]]:
    draw_nothing(monkeypatch)
    with sleeping_engine(), folders(tmp_path) as make:
        yield lambda **keys: make(num_ranks=2, engine="sleeping", **keys)


@pytest.mark.parametrize(
    ("case", "num_steps"),
    [("ppo", 2), *(pytest.param(case, 20, marks=pytest.mark.sweep) for case in CASES)],
)
def test_what_moves_keeps_to_the_table_and_changes_no_bit(make: Callable[..., Trainer], case: str, num_steps: int):
    moved = watched_run(make, case, num_steps, offload=True)
    stayed = watched_run(make, case, num_steps, offload=False)
    compare(moved, stayed)


@pytest.mark.sweep
def test_two_hundred_steps_leave_memory_as_it_was(make: Callable[..., Trainer]) -> None:
    """Bytes of what moves are constant to the byte once optimizers have their state, and no process grows."""
    trainer = make(case="ppo", max_steps=200, shape={"hidden_size": 64, "intermediate_size": 128})
    recorder = Recorder(trainer)
    lines = [recorder.step() for _ in range(200)]
    for steps in recorder.ranks:
        sizes = [{(move.tag, move.num_bytes) for move in step.moves} for step in steps[2:]]
        assert sizes == [sizes[0]] * 198 and len(sizes[0]) == 8
    smallest = min(size for _, size in sizes[0])
    assert smallest > 30_000
    assert slope([line["memory/process_bytes"] for line in lines[20:]]) < 0.1 * smallest
    # Of the whole machine, on which others work as well.
    assert slope([line["memory/available_bytes"] for line in lines[20:]]) > -smallest
