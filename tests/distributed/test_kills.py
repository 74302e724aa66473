"""Runs that lose processes at random moments: on one process, and on several ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.callers import build_policy
from tests.support.kills.killed import BACKGROUND, HOLDING, Killed
from tests.support.kills.killed_functions import Line, adding, booking, lengths, long_in_a_process, sandboxed
from tests.support.kills.killed_runs import Program, Starter
from tests.support.tiny import sums

pytestmark = pytest.mark.slow  # processes are started
SWEEP = (pytest.mark.sweep, pytest.mark.timeout(3600))
PLAIN: dict[str, dict[str, Any]] = {
    "grpo": {"async_save": True},
    "ppo": {"async_save": True, "algorithm": "ppo", "critic_learning_rate": 1e-2, "num_generations": 2},
}
MOMENTS = {
    "grpo": (BACKGROUND, "update", "rollout", "handoff", "checkpoint"),
    "ppo": (BACKGROUND, "update", "rollout", "handoff", "checkpoint", "logprobs"),  # of reference and critic
}
AGENTS = {
    "max_steps": 3,
    "prompts_per_step": 3,
    "max_prompt_length": 60,
    "max_completion_length": 600,  # else a message of a lost process may leave no room for an answer
    "max_tool_calling_iterations": 3,
    "stop_token_ids": None,
    "tool_processes": 1,
    "save_rollouts": False,
    "learning_rate": 1e-3,
}
SLEEPY = "import time; time.sleep(0.03); print(4)"
TOOLS = [
    ("tool", adding, [("add", {"a": 1, "b": 2}), ("add", {"a": 20, "b": 3})], ["ended with signal SIG"]),
    (
        "sandbox",
        sandboxed,
        [("python", {"code": "print(1 + 2)"}), ("python", {"code": SLEEPY})],
        ["ended by signal 9", "the sandbox died", "the process of the sandbox did not start"],
    ),
]


@pytest.fixture
def play(tmp_path: Path, forks: Any, record_property: Any):
    """Make a `Killed`, on forked ranks if there are several; what its kills hit is told at the end."""
    made: list[Killed] = []

    def make(keys: dict[str, Any], *, seed: int, num_ranks: int = 1, num_steps: int = 6, **program: Any) -> Killed:
        if num_ranks > 1:
            keys = {"num_ranks": num_ranks, **keys}
            program["environment"] = forks.environment()
            used.enter_context(forks.used())
        starter = Starter(tmp_path, Program(keys, is_slow_disk=num_ranks == 1, **program))
        made.append(Killed(tmp_path, starter, seed=seed, num_ranks=num_ranks, num_steps=num_steps))
        return made[-1]

    with contextlib.ExitStack() as used:
        yield make
    for killed in made:
        killed.tell(record_property)


@pytest.mark.parametrize(
    ("holding", "num_kills"),
    [("both", 3), *(pytest.param(holding, 10, marks=SWEEP) for holding in HOLDING)],
)
def test_a_run_that_is_killed_at_random_moments_is_the_uninterrupted_one(holding, num_kills, play):
    """SIGKILL after a random part of the CPU time in which the whole run trains."""
    play(HOLDING[holding], seed=num_kills).play(num_kills)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("holding", "num_kills"), [("partial", 4), ("both", 3)])
def test_a_run_on_two_ranks_that_is_killed_at_random_moments_is_the_uninterrupted_one(holding, num_kills, play):
    """SIGKILL of the driver, after a random part of the seconds in which the whole run trains."""
    play(HOLDING[holding], seed=num_kills, num_ranks=2).play(num_kills)


@pytest.mark.parametrize(
    ("algorithm", "num_kills"), [("ppo", 3), *(pytest.param(name, 6, marks=SWEEP) for name in PLAIN)]
)
def test_a_run_is_killed_in_each_phase_and_during_background_saves(algorithm, num_kills, play):
    killed = play(PLAIN[algorithm], seed=num_kills)
    killed.play(num_kills, MOMENTS[algorithm])
    assert any(kill.is_saving for kill in killed.kills)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", PLAIN)
def test_a_driver_of_two_ranks_is_killed_in_each_phase(algorithm, play):
    play(PLAIN[algorithm], seed=4, num_ranks=2).play(6, MOMENTS[algorithm])


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", PLAIN)
def test_ranks_are_killed_and_the_same_process_goes_on(algorithm, play):
    play({**PLAIN[algorithm], "max_restarts": 9}, seed=5, num_ranks=2).play(6, MOMENTS[algorithm], "rank")


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_does_without_reward_processes_that_are_killed(num_ranks, play):
    """Their calls are made again."""
    keys = {**PLAIN["ppo"], "reward_processes": 2}
    play(keys, seed=6, num_ranks=num_ranks, reward=long_in_a_process).play(
        6, ("rollout", "rollout", "update"), "reward"
    )


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", PLAIN)
def test_a_run_goes_on_with_other_numbers_of_ranks(algorithm, play):
    killed = play({**PLAIN[algorithm], "num_ranks": 2}, seed=7, num_ranks=2)
    killed.play_ranks([2, 1, 4], ["update", "rollout"], 1e-5)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("num_rows", "num_steps"), [(12, 6), (10, 5)])
def test_a_run_is_killed_exactly_at_the_end_of_an_epoch(is_async, num_rows, num_steps, play):
    """Epochs of three steps; and of two and a half, so that a step has prompts of two of them."""
    keys = {"async_save": is_async, "max_steps": None, "num_train_epochs": 2, "algorithm": "ppo", "num_generations": 2}
    play(keys, seed=8, rows=sums(num_rows), num_steps=num_steps).play_at([3, num_steps])


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("victim", "make_tools", "calls", "words"), TOOLS, ids=["process", "sandbox"])
def test_a_call_whose_process_is_killed_is_made_again(victim, make_tools, calls, words, play):
    """Nobody is told of it: samples and weights are those of the uninterrupted run."""
    model, tokenizer = build_policy(calls, favour={"k": 3.0})
    rows = [{"prompt": [{"role": "user", "content": f"q{number}"}]} for number in range(40)]
    given = {"model": model, "tokenizer": tokenizer, "rows": rows, "make_tools": make_tools}
    killed = play(AGENTS, seed=9, num_steps=3, **given)
    assert killed.play_tools(6, ("rollout", "rollout", "update"), victim, words) == 0
    assert any(kill.is_in_call for kill in killed.kills)


CONVERSATIONS = [
    pytest.param("driver", 1, 4, {}, id="driver"),
    pytest.param("driver", 1, 50, {}, id="driver, 50", marks=SWEEP),
    pytest.param("driver", 1, 20, {"rollout.async_level": 1, "save_steps": 2}, id="held", marks=SWEEP),
    pytest.param("driver", 2, 10, {}, id="driver of two ranks", marks=SWEEP),
    pytest.param("rank", 2, 10, {"max_restarts": 99}, id="rank", marks=SWEEP),
]


@pytest.mark.parametrize(("victim", "num_ranks", "num_kills", "keys"), CONVERSATIONS)
def test_conversations_survive_kills(victim, num_ranks, num_kills, keys, play, tmp_path):
    """No turn and no call that has ended is made again, no effect of a tool comes twice, no trajectory fails, and what
    is trained is that of the uninterrupted run, to the bit."""
    model, tokenizer = build_policy([("book", {"amount": 3}), ("move", {"by": 5}), ("move", {"by": 1})])
    rows = [{"prompt": [{"role": "user", "content": f"q{start}"}], "start": start} for start in range(40)]
    program = {"model": model, "tokenizer": tokenizer, "rows": rows, "make_tools": booking, "make_environment": Line}
    own = {"max_completion_length": 120, "max_prompt_length": 100, "save_rollouts": True, "tool_processes": 0}
    program["reward"] = lengths  # what is held whole is scored again in a resumed run, in another step
    keys = {**AGENTS, **own, **keys}
    killed = play(keys, seed=num_kills, num_ranks=num_ranks, num_steps=3, **program)
    killed.play(num_kills, ("rollout", "rollout", "rollout", "update"), victim)
    assert any(kill.doing.phase == "rollout" for kill in killed.kills)
    effects = [{path.name for path in run.iterdir()} for run in (tmp_path / "effects").iterdir()]
    assert len(effects) > 1 and len(effects[0]) > 20 and all(names == effects[0] for names in effects)
