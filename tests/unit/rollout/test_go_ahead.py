"""Ranks that only generate under random schedules: newer weights that come at any time, interrupts, kills. Nothing is
lost, nothing is used twice, no token is too old, and every token has the version of its weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rollout import held_turns
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.dealing import TaskList, split_off
from hybrid_rl.rollout.hold_rule import HoldRule
from tests.unit.rollout.holding import Run, Script, Setting, listen, with_refills
from tests.unit.rollout.holding_agents import AgentRun, Environments, sleepy

NUM_STEPS = 6


def setting_of(rng: random.Random) -> Setting:
    """Any of the settings that validate allows with rollout_ranks, small."""
    num_prompts = rng.randint(1, 4)
    oversample = rng.choice((0, rng.randint(1, 2 * num_prompts)))
    least = 1 - (-oversample // num_prompts)
    setting = Setting(
        num_prompts,
        rng.randint(1, 3),
        ahead=num_prompts,
        oversample=oversample,
        max_staleness=least + rng.choice((0, 0, 1, 3)),
        order="fifo",
        check_steps=rng.choice((1, 2, 8)),
        num_ranks=rng.randint(1, 4),
        slots=rng.randint(1, 8),
        max_num_waiting=rng.choice((4, 100)),
        is_apart=True,
    )
    return with_refills(setting)


class SplitRun(Run):
    """A run whose ranks deliver a batch and then go on with the next one. looks: of each rank in a step, after which
    newer weights are there for it; None = they come when it is done."""

    looks: int | None = None
    num_taken = 0
    later: Any = None

    def begin(self, *later: Any) -> None:
        self.later = later

    def go_ahead(self) -> None:
        tasks, call = self.later
        looks = [self.looks] * self.num_ranks

        def run(rank: int) -> int:
            self.script.of_rank(rank)
            mine, its, learner, num_taken = tasks[rank :: self.num_ranks], call, call.version + 1, 0

            def is_outdated() -> bool:
                left = looks[rank]
                if left is None or its.version == learner:
                    return False
                looks[rank] = left - 1
                return left <= rank % 2  # some see them sooner

            while self.ranks[rank].go_ahead(mine, its, learner, is_outdated)[0]:
                mine, its, num_taken = [], replace(its, version=learner), num_taken + 1
                self.engines[rank].policy_version = learner
            return num_taken

        with ThreadPoolExecutor(self.num_ranks) as pool:
            taken = list(pool.map(run, range(self.num_ranks)))
        assert len({*taken}) == 1 and taken[0] <= 1
        self.num_taken += taken[0]


class SplitAgentRun(SplitRun, AgentRun):
    """The same with agents."""


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(25), id="25"),
        pytest.param(range(25, 10_000), id="10000", marks=[pytest.mark.sweep, pytest.mark.timeout(7200)]),
    ],
)
def test_random_schedules_lose_nothing_and_keep_the_bound(seeds, tmp_path, monkeypatch):
    scripts: list[Script] = []
    listen(monkeypatch, lambda: scripts[0])
    num_taken = num_interrupted = 0
    for seed in seeds:
        rng = random.Random(seed)
        setting = setting_of(rng)
        run = SplitRun(setting, tmp_path / str(seed))
        try:
            play(run, rng, scripts)
        except BaseException as error:
            error.add_note(f"seed {seed}: {setting}")
            raise
        num_taken += run.num_taken
        num_interrupted += run.num_interrupted
    assert num_taken > len(seeds) / 2 and num_interrupted > len(seeds) / 2


def play(run: SplitRun, rng: random.Random, scripts: list[Script]) -> None:
    """Steps whose batch is delivered, and the next one generated while newer weights come, or Ctrl-C; kills between."""
    run.num_interrupted = 0
    saved = False
    while run.step < NUM_STEPS:
        scripts[:] = [run.script]
        if rng.random() < 0.2:
            with pytest.raises(KeyboardInterrupt):  # the step is taken back after its batch has come
                run.one_step(scores=False)
            run.looks = None
            run.go_ahead()  # which had begun
        run.one_step()
        run.looks = rng.randint(1, 6) if rng.random() < 0.6 else None
        if rng.random() < 0.3:
            run.script.looks = {rng.randrange(run.num_ranks): rng.randint(1, 3)}
            run.num_interrupted += 1
        run.go_ahead()
        run.script.looks = {}
        run.check_prompts()
        held = [group for rank in run.ranks for group in rank.held(run.step)]
        assert all(group.oldest_version is None or group.oldest_version <= run.step for group in held)
        if rng.random() < 0.4:
            run.evaluate()
        if not saved or rng.random() < 0.6:
            run.save()
            saved = True
        if rng.random() < 0.2:
            run.kill(rng.randint(1, 4))


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(4), id="4"),
        pytest.param(range(4, 2000), id="2000", marks=[pytest.mark.sweep, pytest.mark.timeout(7200)]),
    ],
)
def test_random_schedules_of_agents_lose_nothing_and_keep_the_bound(seeds, tmp_path, monkeypatch):
    """Newer weights come in the middle of turns and while tools work; ranks that share an engine step together."""
    scripts: list[Script] = []
    listen(monkeypatch, lambda: scripts[0])
    monkeypatch.setattr(held_turns, "PATIENCE_SECONDS", 0.001)
    num_taken = num_broken = num_others = 0
    for seed in seeds:
        rng = random.Random(seed)
        setting = replace(setting_of(rng), is_shared=rng.random() < 0.3)
        environments = Environments(sleepy(seed, 0.004))
        keys = {"max_open_trajectories": rng.choice((None, 1, 3))}
        run = SplitAgentRun(setting, tmp_path / str(seed), environments=environments, keys=keys)
        try:
            play(run, rng, scripts)
            run.close()
            assert environments.num_rented == environments.num_open == 0
        except BaseException as error:
            error.add_note(f"seed {seed}: {setting}")
            raise
        num_taken += run.num_taken
        num_broken += run.num_broken_turns
        num_others += run.num_others
    assert num_taken > len(seeds) and num_broken > len(seeds) and num_others > len(seeds)


def test_without_what_comes_in_between_it_is_one_step_off(tmp_path, monkeypatch):
    """The samples of all steps are those of the same run in turn, when nothing is held but the next batch."""
    scripts: list[Script] = [Script()]
    listen(monkeypatch, lambda: scripts[0])
    make: Callable[[type[Run], str], Run] = lambda kind, name: kind(  # noqa: E731
        Setting(
            3,
            2,
            ahead=3,
            oversample=0,
            max_staleness=1,
            order="fifo",
            check_steps=2,
            num_ranks=2,
            slots=4,
            max_num_waiting=100,
            is_apart=kind is SplitRun,
        ),
        tmp_path / name,
    )
    split, whole = make(SplitRun, "split"), make(Run, "whole")
    for _ in range(NUM_STEPS):
        whole.one_step()
        split.one_step()
        split.go_ahead()
        assert split.steps == whole.steps
        held = [[group.group for group in rank.held(split.step)] for rank in split.ranks]
        assert [group for of_rank in held for group in of_rank]


def test_the_next_batch_has_the_last_places_whatever_is_expected_of_prompts():
    """The first step begins 2 prompts for itself and 2 for the next one; the longest of each start first, and are dealt
    to ranks by tokens."""
    rows = [PromptRow(number, str(number), (number,), {}) for number in range(4)]
    rule = HoldRule(2, 1, ahead=2)
    call = RolloutCall(1, SamplingParams(max_tokens=40), 0, TrainerState(1, 9, 0.0), "train/1", 0, hold=rule)
    expected = (3, 9, 2, 30)
    tasks = TaskList([RolloutTask(place, row, expected[place]) for place, row in enumerate(rows)], call, {1: 5})
    present, following = split_off(tasks, 2)
    assert [task.place for task in present] == [1, 0] and [task.place for task in following] == [3, 2]
    assert [task.place for task in tasks] == [3, 1, 0, 2]
    assert [[task.place for task in part] for part in present.dealt(2)] == [[1], [0]]
