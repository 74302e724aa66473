"""Runs over vLLM that are killed at random moments."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import forks as forks
from tests.support.kills.killed import HOLDING, Killed
from tests.support.kills.killed_runs import KEYS, Program, Starter
from tests.support.tiny import build_model
from tests.vllm.test_partial import KEYS as OF_VLLM
from tests.vllm.test_partial import SHAPE
from tests.vllm.test_trainer_ranks import short_folder as short_folder

pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(3600)]
ENGINE = {name: OF_VLLM[name] for name in OF_VLLM if name not in {*KEYS, "rollout.partial", "oversample"}}
SAVING: dict[str, Any] = {"async_save": True}
PLAIN: dict[str, dict[str, Any]] = {
    "grpo": SAVING,
    "ppo": {**SAVING, "algorithm": "ppo", "critic_learning_rate": 1e-2, "num_generations": 2},
}


@pytest.fixture
def play(tmp_path: Path, forks: Any, short_folder: Path, record_property: Any):
    """Make a `Killed` whose engine is vLLM, with per_request_seeds=true; of two ranks tensor parallel over both."""
    assert ENGINE["engine_args.per_request_seeds"]
    made: list[Killed] = []

    def make(keys: dict[str, Any], *, seed: int, num_ranks: int = 1) -> Killed:
        program = Program({**ENGINE, **keys}, model=build_model(**SHAPE), is_vllm=True, is_slow_disk=num_ranks == 1)
        if num_ranks > 1:
            program.environment = forks.environment()
            used.enter_context(forks.used())
            program.keys |= {"num_ranks": num_ranks, "tensor_parallel_size": num_ranks, "handoff.transport": "auto"}
            program.keys |= {"ray.env_vars": {"TMPDIR": str(short_folder)}}
        made.append(Killed(tmp_path, Starter(tmp_path, program), seed=seed, num_ranks=num_ranks))
        return made[-1]

    with contextlib.ExitStack() as used:
        yield make
    for killed in made:
        killed.tell(record_property)


@pytest.mark.parametrize("holding", HOLDING)
def test_a_run_with_held_groups_that_is_killed_is_the_uninterrupted_one(holding, play):
    """SIGKILL after a random part of the CPU time in which the whole run trains."""
    play(HOLDING[holding], seed=2).play(2)


@pytest.mark.parametrize("algorithm", PLAIN)
def test_a_run_is_killed_in_each_phase_and_during_background_saves(algorithm, play):
    play(PLAIN[algorithm], seed=3).play(4, ("background", "rollout", "update", "handoff"))


@pytest.mark.parametrize("victim", ["driver", "rank"])
def test_a_run_on_two_ranks_that_share_an_engine_is_killed(victim, play):
    play({**PLAIN["ppo"], "max_restarts": 9}, seed=4, num_ranks=2).play(2, ("rollout", "update"), victim)
