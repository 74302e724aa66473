"""Trajectories that are held between steps: what is dropped is counted, other ranks learn of failures, and evaluations
have room beside them. What must hold whatever happens is proved by `stream_machine`."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.process import threads
from hybrid_rl.rollout import turns as engine_turns
from tests.unit.rollout.engine_runs import EngineRun, EngineSetting
from tests.unit.rollout.holding import KnownEngine, RankFailedError


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert not [thread for thread in set(threading.enumerate()) - before if "agents" in thread.name]


def run_of(folder: Path, *settings: Any, **others: Any) -> EngineRun:
    """A run of agents."""
    return EngineRun(EngineSetting(*settings, has_agents=True, **others), folder)


def test_what_is_dropped_is_gone_and_all_that_was_generated_is_delivered_or_dropped(tmp_path, monkeypatch):
    """Trajectories of one to four turns beside each other, so that the longest are dropped on their way."""
    run, made = run_of(tmp_path, 2, 1, 0, 2, 0, "fifo", 1, 1, 4, 100, drops=True), Counter[str]()
    environments = run.environments
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
    delivered = [
        (step.version, [version for version in sample[1] if version >= 0])
        for step in run.steps
        for sample in step.samples.values()
    ]
    assert all({*versions} == {version} for version, versions in delivered)
    assert made["groups"] == 2 * 4 and made["tokens"] > 20
    assert run.engines[0].counters.num_generated_tokens == made["tokens"] + sum(
        len(versions) for _, versions in delivered
    )


@pytest.mark.parametrize("number", range(1, 5))
def test_what_fails_between_two_engine_steps_is_told_to_ranks_that_share_the_engine(number, tmp_path, monkeypatch):
    """Whichever of the two steps between two looks it is: nobody waits for a step that does not come."""
    run = run_of(tmp_path, 2, 2, 0, 3, 2, "fifo", 2, 2, 3, 100, is_shared=True)
    monkeypatch.setattr(engine_turns.LoopWatch, "look", lambda watch: run.script.watch())
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
    client = EngineClient(KnownEngine(1, 1))
    turns = engine_turns.EngineTurns(client)

    async def nothing() -> None:
        return None

    turns.start(nothing).result()
    turns.release()
    with client.session():
        turns.begin(0)
        turns.step()
        turns.check()
        assert turns.is_idle


def test_held_trajectories_leave_room_for_the_others(tmp_path):
    """At most four are under way at once, and one of an evaluation beside four that are held."""
    run, held = run_of(tmp_path, 2, 2, 0, 2, 1, "fifo", 2, 1, 8, 100, max_open=4), list[int]()
    environments = run.environments
    for _ in range(4):
        run.one_step()
        held.append(environments.num_open)
        run.evaluate()
    run.close()
    assert max(held) == 4 and environments.most_open == 5


def test_the_time_of_a_trajectory_does_not_run_between_rollouts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(engine_turns, "time", SimpleNamespace(monotonic=lambda: now[0]))
    client: Any = None
    turns, seen = engine_turns.EngineTurns(client), []
    for _ in range(2):
        turns.begin(0)
        now[0] += 3
        seen.append(turns.seconds())
        turns.release()
        now[0] += 50
        seen.append(turns.seconds())
    assert seen == [3, 3, 6, 6]


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_is_held_begins_again_after_a_step_that_is_taken_back_and_in_a_resumed_run(is_killed, tmp_path):
    """In the same process from the turns that had ended; here a resumed run has no record, so that all of its tokens
    are new."""
    run = run_of(tmp_path, 2, 2, 0, 3, 2, "fifo", 2, 1, 3, 100)
    run.one_step()
    run.save()
    if is_killed:
        run.kill()
    else:
        with pytest.raises(KeyboardInterrupt):
            run.one_step(scores=False)
    run.one_step()
    made_by = {version for sample in run.steps[1].samples.values() for version in sample[1]}
    assert made_by == ({-1, 1} if is_killed else {-1, 0, 1})
    run.check()
    run.close()
