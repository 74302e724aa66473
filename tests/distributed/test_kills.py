"""Runs with held groups that are killed at random moments: on one process, and on two ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hybrid_rl import Trainer
from tests.distributed.conftest import SETUP_WORKER
from tests.distributed.ranks import forking
from tests.killed import HOLDING, KEYS, Killed, long
from tests.no_pictures import draw_nothing
from tests.tiny import build_model, build_tokenizer, sums

pytestmark = pytest.mark.slow  # processes are started
SWEEP = (pytest.mark.sweep, pytest.mark.timeout(3600))


def train(folder: Path, keys: dict[str, Any], mark: Path, environment: dict[str, str] | None = None) -> None:
    """The whole program of a process that may be killed. mark: made when training begins; environment: of ranks that
    are forks."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        if environment is not None:
            import ray._private.ray_constants

            patch.setattr(ray._private.ray_constants, "SETUP_WORKER_FILENAME", str(SETUP_WORKER))
            for name, value in environment.items():
                patch.setenv(name, value)
        keys = {**KEYS, "output_dir": str(folder), **keys}
        with Trainer(build_model(), long, sums(60), tokenizer=build_tokenizer(), **keys) as trainer:
            mark.touch()
            trainer.fit()


class Starter:
    """Starts such processes, and knows when they began to train. changes: keys of all of them."""

    def __init__(self, folder: Path, changes: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self._mark, self._changes, self._environment = folder / "mark", changes, environment
        self._began = 0.0

    def start(self, folder: Path, keys: dict[str, Any]) -> Any:
        self._mark.unlink(missing_ok=True)
        arguments = (folder, {**self._changes, **keys}, self._mark, self._environment)
        process = forking().Process(target=train, args=arguments, daemon=True)
        process.start()
        while process.is_alive() and not self._mark.exists():
            process.join(0.01)
        self._began = 0.0
        self._began = self.cpu_seconds(process) if self._environment is None else time.monotonic()
        return process

    def cpu_seconds(self, process: Any) -> float:
        """Of one process, which alone does the work: other programs change nothing."""
        if not process.is_alive():
            return 0.0
        return sum(psutil.Process(process.pid).cpu_times()[:2]) - self._began

    def clock_seconds(self, process: Any) -> float:
        return time.monotonic() - self._began


@pytest.mark.parametrize(
    ("holding", "num_kills"),
    [("both", 3), *(pytest.param(holding, 10, marks=SWEEP) for holding in HOLDING)],
)
def test_a_run_that_is_killed_at_random_moments_is_the_uninterrupted_one(holding, num_kills, tmp_path):
    """SIGKILL after a random part of the CPU time in which the whole run trains."""
    starter = Starter(tmp_path, HOLDING[holding])
    Killed(tmp_path, starter.start, starter.cpu_seconds, seed=num_kills).play(num_kills)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("holding", "num_kills"), [("partial", 4), ("both", 3)])
def test_a_run_on_two_ranks_that_is_killed_at_random_moments_is_the_uninterrupted_one(
    forks, holding, num_kills, tmp_path
):
    """SIGKILL of the driver, after a random part of the seconds in which the whole run trains."""
    starter = Starter(tmp_path, {**HOLDING[holding], "num_ranks": 2}, forks.environment())
    with forks.used():
        Killed(tmp_path, starter.start, starter.clock_seconds, seed=num_kills, num_ranks=2).play(num_kills)
