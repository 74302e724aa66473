"""The whole cycle of memory on two ranks, with an engine that really sleeps: by the table at every moment, to the bit
the run in which the trainer's side stays, and after any fault the run that nothing disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from hybrid_rl import Trainer
from hybrid_rl.errors import HybridRLError, MemoryRefusedError
from tests.support.engines.sleeping_engine import sleeping_engine
from tests.support.memory.memory_faults import How, fail_once
from tests.support.memory.memory_runs import CASES, compare, compare_checkpoints, folders, watched_run
from tests.support.memory.memory_watch import Recorder, held_bytes, slope

pytestmark = pytest.mark.slow  # processes are started

Make = Callable[..., Trainer]
NUM_STEPS = 2
FAULTY_STEP = 2


@pytest.fixture
def make(tmp_path: Path, forked_ranks: Any) -> Iterator[Make]:
    with sleeping_engine(), folders(tmp_path) as make:
        yield lambda **keys: make(num_ranks=2, engine="sleeping", **keys)


@pytest.fixture(scope="module")
def kept() -> dict[str, Path]:
    """Folders of runs that nothing disturbed, by their case."""
    return {}


@pytest.mark.parametrize(
    ("case", "num_steps"),
    [("ppo", NUM_STEPS), *(pytest.param(case, 20, marks=pytest.mark.sweep) for case in CASES)],
)
@pytest.mark.sweep
def test_what_moves_keeps_to_the_table_and_changes_no_bit(
    make: Make, kept: dict[str, Path], case: str, num_steps: int
) -> None:
    moved = watched_run(make, case, num_steps, offload=True)
    if num_steps == NUM_STEPS:
        kept[case] = moved
    compare(moved, watched_run(make, case, num_steps, offload=False))


def faulty(tag: str, how: How | Literal["ctrl-c"]) -> Callable[..., list[float]]:
    """A reward of which rank 1's, in a step, prepares a fault of what comes after it, or presses the driver's Ctrl-C.
    Rewards run on the ranks."""
    driver = os.getpid()

    def reward(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        import torch.distributed as dist

        from tests.support.scores import spread

        if trainer_state.global_step == FAULTY_STEP and dist.get_rank() == 1 and not hasattr(fail_once, "is_done"):
            fail_once.is_done = True  # type: ignore[attr-defined]
            if how == "ctrl-c":
                os.kill(driver, signal.SIGINT)
            else:
                fail_once(tag, how)
        return spread(completion_ids)

    reward.__name__ = "spread"
    return reward


@pytest.mark.parametrize(
    ("tag", "how", "says"),
    [
        ("reference", "no memory", "rank 1: wake of 'reference': OutOfMemoryError: .*memory was put back"),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                ("critic", "no memory", "rank 1: wake of 'critic': OutOfMemoryError: .*memory was put back"),
                ("optimizer", "no memory", "rank 1: wake of 'optimizer': OutOfMemoryError: .*memory was put back"),
                ("", "no room", "rank 1: room for 'engine_weights': MemoryStateError: .*memory was put back"),
                ("", "engine", "asked to fail"),
                ("actor", "kill", "policy rank 1 of 2 failed"),
                ("", "ctrl-c", ""),
            )
        ),
    ],
)
def test_one_rank_fails_and_the_run_ends_as_the_undisturbed_one(
    make: Make, kept: dict[str, Path], tag: str, how: Any, says: str
) -> None:
    """Before the update the step is taken back on both ranks, and the same Trainer goes on; later, or if memory is
    broken, a new one resumes."""
    if "ppo" not in kept:
        kept["ppo"] = watched_run(make, "ppo", NUM_STEPS, offload=True)
    trainer = make(case="ppo", max_steps=NUM_STEPS, save_steps=1, run_name="disturbed", reward=faulty(tag, how))
    trainer.step()
    with pytest.raises((HybridRLError, KeyboardInterrupt), match=f"(?s){says}") as raised:
        trainer.step()
    goes_on = tag in ("reference", "critic") or how == "ctrl-c"
    assert isinstance(raised.value, KeyboardInterrupt) == (how == "ctrl-c")
    assert isinstance(raised.value, MemoryRefusedError) == (how in ("no memory", "no room"))
    if not goes_on:
        with pytest.raises(HybridRLError, match="make a new Trainer"):
            trainer.step()
        trainer.close()
        trainer = make(case="ppo", max_steps=NUM_STEPS, save_steps=1, run_name="disturbed", resume="auto")
        assert trainer.global_step == FAULTY_STEP - 1
    trainer.fit()
    trainer.close()
    name = f"checkpoint-{NUM_STEPS}"
    compare_checkpoints(trainer.run_folder / name, kept["ppo"] / name)


@pytest.mark.sweep
def test_an_arena_that_is_too_small_is_told_at_the_start(make: Make) -> None:
    with pytest.raises(HybridRLError, match=r"memory\.host_memory"):
        make(case="ppo", max_steps=1, host_memory="100KB")


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_two_hundred_steps_leave_memory_as_it_was(make: Make) -> None:
    """Bytes of what moves are constant to the byte once optimizers have their state, and no process grows."""
    trainer = make(case="ppo", max_steps=200, shape={"hidden_size": 64, "intermediate_size": 128})
    recorder = Recorder(trainer)
    ranks = [process.pid for process in psutil.Process().children(recursive=True) if "RankServer" in process.name()]
    assert len(ranks) == 2
    lines, held = [], []
    for _ in range(200):
        lines.append(recorder.step())
        held.append(held_bytes(*ranks))
    for steps in recorder.ranks:
        sizes = [{(move.tag, move.num_bytes) for move in step.moves} for step in steps[2:]]
        assert sizes == [sizes[0]] * 198 and len(sizes[0]) == 8
    smallest = min(size for _, size in sizes[0])
    assert smallest > 30_000
    # Of its store of objects Ray touches new pages for a long time: some kB per step.
    assert slope([line["memory/process_bytes"] for line in lines[20:]]) < 0.5 * smallest
    assert slope(held[20:]) < 0.5 * smallest  # and what they have not mapped
