"""The trainer's side moves beside a real vLLM, whose own memory stays on CPUs: by the table at every moment, and to the
bit the run in which nothing moves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from tests.support.memory.memory_runs import CASES, compare, folders, watched_run
from tests.vllm.test_trainer import SHAPE

pytestmark = pytest.mark.slow

VLLM: dict[str, Any] = {
    "engine": "vllm",
    "engine_args.enforce_eager": True,
    "kv_cache_memory_bytes": 2**22,
    "engine_args.per_request_seeds": True,
    "handoff.probe_tolerance": 1e-5,
    "shape": SHAPE,
}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    # Temporary files of ranks: the path of a socket may not be long.
    root = Path(tempfile.gettempdir()).anchor + "tmp"
    with tempfile.TemporaryDirectory(prefix="t", dir=root) as short, folders(tmp_path) as make:

        def trainer(*, num_ranks: int, **keys: Any) -> Trainer:
            ranks = {} if num_ranks == 1 else {"num_ranks": num_ranks, "ray.env_vars": {"TMPDIR": short}}
            return make(**{**VLLM, **ranks, **keys})

        yield trainer


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("case", "num_ranks", "num_steps"),
    [("grpo", 1, 2), *(pytest.param(case, 2, 20, marks=pytest.mark.sweep) for case in CASES)],
)
def test_what_moves_keeps_to_the_table_and_changes_no_bit(
    make: Callable[..., Trainer], case: str, num_ranks: int, num_steps: int
) -> None:
    keys = {"num_ranks": num_ranks, "engine_sleeps": False}
    moved = watched_run(make, case, num_steps, offload=True, **keys)
    stayed = watched_run(make, case, num_steps, offload=False, **keys)
    compare(moved, stayed)
