"""The whole cycle of memory on two ranks, with an engine that really sleeps: by the table at every moment, and a run
whose trainer's side moves is to the bit the run in which all of it stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from tests.memory_runs import CASES, compare, folders, watched_run
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
