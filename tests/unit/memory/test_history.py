"""The record of a step's memory: what was there when, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybrid_rl.memory import history as module
from hybrid_rl.memory.history import KEPT_STEPS, History, Level, Span, StepMemory
from hybrid_rl.memory.leases import Leases, Resident, Transition


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that only the test moves; for the leases too."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = clock.time = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("hybrid_rl.memory.leases.time", clock)
    return clock


def test_a_step_as_it_happened(clock: SimpleNamespace) -> None:
    history = History()
    clock.now = 100.0
    history.end_step({"actor": 10, "optimizer": 0, "kv_cache": 0})
    wake = Transition("optimizer", True, 0.5, 200.0, 20)
    # Its first update gave it state of 5 bytes more, which is seen as it leaves.
    leave, generate = Transition("optimizer", False, 0.25, 203.0, 25), Transition("kv_cache", True, 0.5, 203.5, 40)
    clock.now = 200.5
    history.note([wake])
    with history.phase("update"):
        clock.now = 203.0
    clock.now = 204.0
    history.note([leave, generate])
    with history.phase("generate", lambda: 77):
        clock.now = 210.0
    history.end_step({"actor": 10, "optimizer": 0, "kv_cache": 40})
    _, step = history.steps
    assert step == StepMemory(
        200.0,
        210.0,
        {"actor": 10, "optimizer": 0, "kv_cache": 0},
        (Level(200.0, "optimizer", 20), Level(203.25, "optimizer", 0), Level(203.5, "kv_cache", 40)),
        (Span("update", 200.5, 203.0), Span("generate", 204.0, 210.0, 77)),
        (wake, leave, generate),
    )
    assert step.series() == (
        [0.0, 3.25, 3.5, 10.0],
        {"actor": [10, 10, 10, 10], "optimizer": [20, 0, 0, 0], "kv_cache": [0, 0, 40, 40]},
    )


def test_what_grows_without_a_move_is_seen_at_the_end_of_the_step(clock: SimpleNamespace) -> None:
    history = History()
    history.end_step({"optimizer": 0})
    clock.now = 1.0
    with history.phase("update"):
        clock.now = 2.0
    history.end_step({"optimizer": 8})
    with history.phase("update"):
        clock.now = 3.0
    history.end_step({"optimizer": 8})
    _, first, second = history.steps
    assert first.series() == ([0.0, 1.0, 1.0], {"optimizer": [0, 8, 8]})
    assert second.series() == ([0.0, 1.0], {"optimizer": [8, 8]})


def test_what_never_moves_is_there_in_the_first_step(clock: SimpleNamespace) -> None:
    history = History()
    history.note([Transition("actor", True, 0.0, 1.0, 10)])
    clock.now = 1.0
    for engine_bytes in (40, 50):  # what it has grown to by a later phase is told at the end of the step
        history.start(lambda size=engine_bytes: {"actor": 10, "kv_cache": size, "reference": 0})  # type: ignore[misc]
        with history.phase("generate"):
            clock.now += 2.0
    history.end_step({"actor": 10, "kv_cache": 50, "reference": 0})
    (step,) = history.steps
    assert step.before == {"kv_cache": 40, "reference": 0}
    assert step.levels == (Level(1.0, "actor", 10), Level(5.0, "kv_cache", 50))


def test_only_the_last_steps_and_levels_are_kept(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_LEVELS", 2)
    history = History()
    for number in range(1, KEPT_STEPS + 3):
        for add in range(4):
            history.note([Transition("kv_cache", True, 0.0, number + 0.1 * add, 10 * number + add)])
        history.end_step({"kv_cache": 10 * number + 3})
    assert len(history.steps) == KEPT_STEPS
    last = history.steps[-1]
    assert last.before == {"kv_cache": 61} and [level.num_bytes for level in last.levels] == [62, 63]


def test_leases_tell_when_and_how_much(clock: SimpleNamespace) -> None:
    """Two residents of one owner sleep in one call, whose seconds count once."""

    def takes(seconds: float) -> None:
        clock.now += seconds

    def sleep(_: frozenset[str]) -> None:
        takes(2.0)

    residents = [
        Resident("engine_weights", lambda: 3, sleep, lambda: takes(1.0)),
        Resident("kv_cache", lambda: 40, sleep, lambda: takes(0.5), after=("engine_weights",)),
    ]
    leases = Leases(residents)
    for tags in (("engine_weights", "kv_cache"), ()):
        with leases.lease(tags):
            pass
    assert leases.drain_transitions() == [
        Transition("engine_weights", True, 1.0, 0.0, 3),
        Transition("kv_cache", True, 0.5, 1.0, 40),
        Transition("kv_cache", False, 2.0, 1.5, 40),
        Transition("engine_weights", False, 0.0, 1.5, 3),
    ]
    assert leases.drain_transitions() == []


def test_who_sleeps_in_one_call_gives_memory_back_at_its_end(clock: SimpleNamespace) -> None:
    history = History()
    history.end_step({"kv_cache": 40, "engine_weights": 3})
    together = [Transition("kv_cache", False, 2.0, 5.0, 40), Transition("engine_weights", False, 0.0, 5.0, 3)]
    history.note(together)
    clock.now = 9.0
    history.end_step({})
    assert history.steps[-1].levels == (Level(7.0, "kv_cache", 0), Level(7.0, "engine_weights", 0))
