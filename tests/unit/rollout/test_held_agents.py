"""Trajectories that are held between steps: nothing lost or twice under random schedules, versions of every token those
of the weights, environments given back; and which of it can be repeated."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import PeerFailedError
from hybrid_rl.process import threads
from hybrid_rl.rollout import held_turns
from tests.unit.rollout.holding import KnownEngine, RankFailedError, Script, Setting, listen
from tests.unit.rollout.holding_agents import AgentRun, Environments, sleepy

NUM_STEPS = 4
BROKEN_OFF = (KeyboardInterrupt, RankFailedError, PeerFailedError)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert not [thread for thread in set(threading.enumerate()) - before if "agents" in thread.name]


def setting_of(rng: random.Random) -> Setting:
    num_prompts = rng.randint(1, 3)
    ahead = num_prompts * rng.randint(0, 1)
    oversample = rng.randint(0 if ahead else 1, 2 * num_prompts)
    least = ahead // num_prompts + -(-oversample // num_prompts)
    setting = Setting(
        num_prompts,
        rng.randint(1, 3),
        ahead,
        oversample,
        least + rng.choice((0, 0, 1)),
        "fifo" if ahead else rng.choice(("fifo", "freshest")),
        check_steps=rng.choice((1, 2, 8)),
        num_ranks=rng.randint(1, 3),
        slots=rng.randint(1, 8),
        max_num_waiting=rng.choice((4, 100)),
        is_shared=rng.random() < 0.3,
    )
    if not ahead and rng.random() < 0.2:
        return replace(setting, max_staleness=0, order="fifo", drops=True)
    return setting


def play(seed: int, folder: Path, scripts: list[Script]) -> None:
    """A run that is interrupted, fails and is killed at random, with tools that take time."""
    rng = random.Random(seed)
    setting, environments = setting_of(rng), Environments(sleepy(seed, 0.004))
    most = rng.choice((None, 1, 3))
    run = AgentRun(setting, folder, environments=environments, keys={"max_open_trajectories": most})
    scripts[:] = [run.script]
    run.save()
    while run.step < NUM_STEPS:
        chance, rank = rng.random(), rng.randrange(run.num_ranks)
        if chance < 0.25:
            run.script.looks = {rank: rng.randint(1, 12)}
        elif chance < 0.4 and not setting.is_shared:
            run.script.engine_steps = {rank: rng.randint(1, 30)}
        elif chance < 0.4:  # a shared engine that fails ends the run; what fails beside it ends the step
            run.script.watches = {rank: rng.randint(1, 30)}
        is_scored = rng.random() > 0.15
        try:
            run.one_step(scores=is_scored)
        except BROKEN_OFF:
            run.script.forgive()
            if is_scored and run.num_ranks == 1:  # others may have finished the step, and end theirs in the next
                assert environments.num_rented == environments.num_open == 0
            if rng.random() < 0.4:
                run.kill(rng.randint(1, 3))
                scripts[:] = [run.script]
            continue
        run.script.forgive()
        run.check_prompts()
        if setting.drops:
            assert environments.num_rented == environments.num_open == 0
        if rng.random() < 0.3:
            run.evaluate()
        if rng.random() < 0.6:
            run.save()
    run.close()
    assert environments.num_rented == environments.num_open == 0


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(8), id="8"),
        pytest.param(range(8, 2000), id="2000", marks=[pytest.mark.sweep, pytest.mark.timeout(7200)]),
    ],
)
def test_random_schedules_lose_nothing_use_nothing_twice_and_keep_the_bound(seeds, tmp_path, monkeypatch):
    scripts: list[Script] = []
    listen(monkeypatch, lambda: scripts[0])
    monkeypatch.setattr(held_turns, "PATIENCE_SECONDS", 0.001)
    monkeypatch.setattr(threads, "WATCH_SECONDS", 0.0)
    look = threads.LoopWatch.look
    monkeypatch.setattr(threads.LoopWatch, "look", lambda watch: (look(watch), scripts[0].watch()))
    for seed in seeds:
        try:
            play(seed, tmp_path / str(seed), scripts)
        except BaseException as error:
            error.add_note(f"seed {seed}: {setting_of(random.Random(seed))}")
            raise


@pytest.mark.parametrize(
    ("ahead", "num_ranks", "is_shared"), [(0, 1, False), (0, 2, False), (2, 2, False), (0, 2, True), (2, 2, True)]
)
def test_with_instant_tools_a_run_repeats_itself(ahead, num_ranks, is_shared, tmp_path):
    """Samples, versions and order; in turns and between them, trajectories were held."""
    setting = Setting(2, 2, ahead, 3, 2 + ahead // 2, "fifo", 2, num_ranks, 3, 100, is_shared)
    made: list[Any] = []
    for name in "ab":
        run = AgentRun(setting, tmp_path / name, environments=Environments())
        for _ in range(4):
            run.one_step()
        run.close()
        made.append(run.steps)
        assert run.num_broken_turns >= 2 and run.num_others >= 1
    assert made[0] == made[1]


def test_what_is_dropped_is_gone_and_all_that_was_generated_is_delivered_or_dropped(tmp_path, monkeypatch):
    """Trajectories of one to four turns beside each other, so that the longest are dropped on their way."""
    environments, made = Environments(), Counter[str]()
    run = AgentRun(Setting(2, 1, 0, 2, 0, "fifo", 1, 1, 4, 100, drops=True), tmp_path, environments=environments)
    collect = run.collector.take

    def counting(*arguments: Any) -> Any:
        collected = collect(*arguments)
        made.update({name: collected.metrics[f"buffer/dropped_{name}"] for name in ("groups", "tokens")})
        return collected

    monkeypatch.setattr(run.collector, "take", counting)
    for _ in range(4):
        run.one_step()
        run.check_prompts()
        assert environments.num_rented == environments.num_open == 0 and run.ranks[0].held(run.step) == []
    run.close()
    delivered = [(step.version, versions) for step in run.steps for _, versions, _ in step.samples.values()]
    assert all({*versions} == {version} for version, versions in delivered)
    assert made["groups"] == 2 * 4 and made["tokens"] > 20
    assert run.engines[0].num_generated_tokens == made["tokens"] + sum(len(versions) for _, versions in delivered)


@pytest.mark.parametrize("number", range(1, 5))
def test_what_fails_between_two_engine_steps_is_told_to_ranks_that_share_the_engine(number, tmp_path, monkeypatch):
    """Whichever of the two steps between two looks it is: nobody waits for a step that does not come."""
    run = AgentRun(Setting(2, 2, 0, 3, 2, "fifo", 2, 2, 3, 100, is_shared=True), tmp_path, environments=Environments())
    monkeypatch.setattr(held_turns.LoopWatch, "look", lambda watch: run.script.watch())
    run.one_step()
    run.script.watches = {1: number}
    with pytest.raises(RankFailedError, match="rank 1, beside its engine"):
        run.one_step()
    run.script.forgive()
    run.one_step()
    run.check_prompts()
    run.close()


def test_a_rank_steps_its_engine_when_its_agents_are_gone(monkeypatch):
    """Their event loop is closed, and asked nothing any more."""
    monkeypatch.setattr(threads, "WATCH_SECONDS", 0.0)
    client = EngineClient(KnownEngine(1, 1, Script(), 0))
    turns = held_turns.HeldTurns(client)

    async def nothing() -> None:
        return None

    turns.start(nothing).result()
    turns.release()
    with client.session():
        turns.begin(0)
        turns.step()
        turns.check()
        assert turns.is_idle


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_what_would_be_too_old_is_finished_first(num_prompts, tmp_path):
    """The newest groups are taken first, so that old ones would be held for ever; turns are of several versions."""
    setting = Setting(num_prompts, 1, 0, 3 * num_prompts, 3, "freshest", 1, 1, 8, 100)
    run = AgentRun(setting, tmp_path, environments=Environments())
    for _ in range(14):
        run.one_step()  # which checks the bound
    run.close()
    oldest = [step.version - min(versions) for step in run.steps for _, versions, _ in step.samples.values()]
    assert max(oldest) == 3


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_is_held_begins_again_after_a_step_that_is_taken_back_and_in_a_resumed_run(is_killed, tmp_path):
    """So all tokens are new. Without either, some are of the step before."""
    run = AgentRun(Setting(2, 2, 0, 3, 2, "fifo", 2, 1, 3, 100), tmp_path, environments=Environments())
    run.one_step()
    run.save()
    if is_killed:
        run.kill()
    else:
        with pytest.raises(KeyboardInterrupt):
            run.one_step(scores=False)
    run.one_step()
    assert {version for _, versions, _ in run.steps[1].samples.values() for version in versions} == {1}
    run.check_prompts()
    run.one_step()
    assert {version for _, versions, _ in run.steps[2].samples.values() for version in versions} >= {1, 2}
    run.close()


def test_held_trajectories_leave_room_for_the_others(tmp_path):
    """At most four are under way at once, also while held ones stand beside those of an evaluation."""
    setting = Setting(2, 2, 0, 2, 1, "fifo", 2, 1, 8, 100)
    environments = Environments()
    run = AgentRun(setting, tmp_path, environments=environments, keys={"max_open_trajectories": 4})
    held = []
    for _ in range(4):
        run.one_step()
        held.append(environments.num_open)
        run.evaluate()
    run.close()
    assert max(held) > 0 and environments.most_open == 4


def test_the_time_of_a_trajectory_does_not_run_between_rollouts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(held_turns, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client: Any = None
    turns, seen = held_turns.HeldTurns(client), []
    for _ in range(2):
        turns.begin(0)
        now[0] += 3
        seen.append(turns.seconds())
        turns.release()
        now[0] += 50
        seen.append(turns.seconds())
    assert seen == [3, 3, 6, 6]
