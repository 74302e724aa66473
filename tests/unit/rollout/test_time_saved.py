"""Seconds won by holding: by hand, and against the truth on an engine whose steps take what the test says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_rl.engines import engine_client as client
from hybrid_rl.engines.base import SlotUse
from hybrid_rl.engines.step_cost import StepCost
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout import stream
from hybrid_rl.rollout.time_saved import SecondsWon, num_steps
from tests.support.inside.rollouts import plan_of, set_plan
from tests.unit.rollout import holding
from tests.unit.rollout.holding import KnownEngine, Run, Setting, listen

STEP, SEQUENCE, PROMPT = 0.5, 0.125, 0.0625  # seconds; sums of these are exact
SETTING = Setting(
    4,
    3,
    ahead=0,
    oversample=4,
    max_staleness=1,
    order="fifo",
    check_steps=2,
    num_ranks=1,
    slots=64,
    max_num_waiting=100,
)


def use_of(*steps: tuple[int, float], waited: float = 0.0) -> SlotUse:
    cost = StepCost(waited_seconds=waited)
    for num_sequences, seconds in steps:
        cost.add(num_sequences, 0, seconds)
    return SlotUse(cost=cost)


def batch_of(groups: list[int], lengths: list[int]) -> Any:
    return {"group": torch.tensor(groups), "completion_length": torch.tensor(lengths)}


def test_seconds_won_by_hand():
    """10 ms for a step and 5 ms for a sequence. Alone, an engine would have taken 3 steps for 4 tokens: 50 ms, not 35
    and 2 of waiting. Of two the first would have taken 45 ms for a group of 3 tokens, the other one less."""
    batch, steps = batch_of([7, 9], [3, 1]), ((2, 0.02), (1, 0.015))
    assert SecondsWon().of([use_of(*steps, waited=0.002)], batch) == pytest.approx(0.05 - 0.037)
    assert SecondsWon().of([use_of(*steps), use_of(*steps)], batch) == pytest.approx(0.045 - 0.035)


def test_without_counted_steps_nothing_is_said_and_the_first_rollout_is_forgotten():
    batch, won = batch_of([0], [2]), SecondsWon()
    assert won.of([SlotUse(), use_of((1, 0.1), (2, 0.2))], batch) is None
    assert won.of([use_of((2, 9.0), (1, 5.0))], batch) is not None  # it compiled
    assert won.of([use_of((2, 0.02), (1, 0.015))], batch) == pytest.approx(2 * 0.01 + 2 * 0.005 - 0.035)


def test_completions_that_find_no_place_wait_for_one_by_hand():
    """Two at a time: 5 and 2, then 4 from step 2 to 6, then 1 from step 5 to 6."""
    assert num_steps([5, 2, 4, 1], 2) == 6
    assert num_steps([5, 2, 4, 1], 4) == 5 and num_steps([], 4) == 0


class Clock:
    """A clock that engines move. It stands still while ranks wait for each other. groups: those whose prompts were
    computed."""

    seconds = 0.0

    def __init__(self) -> None:
        self.groups: set[Any] = set()

    def perf_counter(self) -> float:
        return self.seconds


class TimedEngine(KnownEngine):
    """Its steps take STEP, SEQUENCE for each token that they generate, and PROMPT for each of a prompt, which the
    samples of a group share, and of a completion that goes on."""

    clock: Clock

    def step(self) -> Any:
        before, waiting = self.counters.num_generated_tokens, list(self._waiting)
        finished = super().step()
        left = {id(one) for one in self._waiting} | {
            id(one)
            for one in waiting
            for done in finished
            if done.id == one.request.id and done.finish_reason == "abort"
        }
        begun = [one.request for one in waiting if id(one) not in left]
        prompts = {request.group: len(request.prompt_ids) for request in begun}
        num_prompt_tokens = sum(prompts.values()) + sum(len(request.begun.token_ids) for request in begun)
        made = self.counters.num_generated_tokens - before
        self.counters.num_prompt_tokens += num_prompt_tokens
        self.clock.groups |= {*prompts}
        self.clock.seconds += STEP * bool(made) + SEQUENCE * made + PROMPT * num_prompt_tokens
        return finished


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(TimedEngine, "clock", clock, raising=False)
    monkeypatch.setattr(holding, "KnownEngine", TimedEngine)
    for module in (client, stream):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


@pytest.mark.parametrize("slots", [64, 5])
def test_a_synchronous_run_wins_nothing(clock, tmp_path, monkeypatch, slots):
    """Also if completions wait for a place."""
    run = Run(replace(SETTING, slots=slots), tmp_path)
    listen(monkeypatch, lambda: run.script)
    set_plan(run.collector, replace(plan_of(run.collector), hold=None, num_extra=0))
    for step in range(4):
        run.engines[0].policy_version = step
        metrics = run.collector.take(step, TrainerState(step + 1, 9, 0.0)).metrics
        assert metrics["timing/won"] == pytest.approx(0, abs=1e-9)
    assert clock.seconds > 10


@pytest.mark.parametrize("ahead", [0, 4])
def test_a_run_that_holds_wins_what_the_same_samples_would_have_taken(clock, tmp_path, monkeypatch, ahead):
    """The truth: steps of all samples that a step has delivered, begun together, with the prompts that it has begun,
    less what the clock says."""
    run, total = Run(replace(SETTING, ahead=ahead, max_staleness=2), tmp_path), 0.0
    listen(monkeypatch, lambda: run.script)
    for step in range(8):
        run.engines[0].policy_version, before, num_before = step, clock.seconds, len(clock.groups)
        collected = run.collector.take(step, TrainerState(step + 1, 9, 0.0))
        lengths = collected.batch["completion_length"].tolist()
        alive = Counter(place for length in lengths for place in range(length))
        truth = sum(STEP + SEQUENCE * number for number in alive.values())
        truth += PROMPT * (len(clock.groups) - num_before) - (clock.seconds - before)
        assert collected.metrics["timing/won"] == pytest.approx(truth, abs=1e-9)
        total += truth
    assert abs(total) > 1
