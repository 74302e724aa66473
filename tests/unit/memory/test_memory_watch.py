"""The watch over residents itself: it is content with a step by the table, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_rl.memory.cycle import ACTOR, ENGINE_WEIGHTS, KV_CACHE, OPTIMIZER, REFERENCE, Cycle
from hybrid_rl.memory.history import Span, StepMemory
from hybrid_rl.memory.leases import Transition
from tests.support.memory.memory_watch import MemoryWatch

RESIDENTS = frozenset({ACTOR, OPTIMIZER, REFERENCE, ENGINE_WEIGHTS, KV_CACHE})
CYCLE = Cycle.of(residents=RESIDENTS, engine_is_actor=False, update_reads_reference=False, moves_reference=False)
# What moves before each phase of a step, "-" to sleep and "+" to wake; the step before ended with `check`.
SCRIPT = (
    ("generate", ""),
    ("score_reference", "-kv_cache -engine_weights +reference"),
    ("update", "-reference +actor +optimizer"),
    ("publish", "-optimizer +engine_weights"),
    ("check", "-actor +kv_cache"),
)
NAMES = ("generate", "score_reference", "update", "publish")


def step_of(script: tuple[tuple[str, str], ...]) -> StepMemory:
    """A step in which each move takes half a second, and each phase ten."""
    now, phases, moves = 0.0, [], []
    for name, words in script:
        for word in words.split():
            moves.append(Transition(word[1:], word[0] == "+", 0.5, now, 8))
            now += 0.5
        if name:
            phases.append(Span(name, now, now + 10.0))
            now += 10.0
    return StepMemory(0.0, now, {}, (), tuple(phases), tuple(moves))


def changed(name: str, words: str) -> tuple[tuple[str, str], ...]:
    return tuple((phase, words if phase == name else old) for phase, old in SCRIPT)


@pytest.fixture
def watch() -> MemoryWatch:
    return MemoryWatch(CYCLE, RESIDENTS, NAMES)


def test_steps_by_the_table(watch: MemoryWatch) -> None:
    assert watch.problems([step_of(SCRIPT)] * 3) == []


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("update", "+actor +optimizer -reference", "actor wakes while reference is awake"),
        ("update", "-reference +optimizer +actor +kv_cache", "kv_cache wakes while optimizer is awake"),
        ("update", "-reference +optimizer", "score_reference needs ['reference'], but ['actor', 'reference'] are"),
        ("check", "-actor", "check needs ['engine_weights', 'kv_cache'], but ['engine_weights'] are awake"),
        ("publish", "+engine_weights", "publish needs ['actor', 'engine_weights'], but ['actor', 'engine_weights'"),
        ("publish", "-optimizer +engine_weights +engine_weights", "engine_weights wakes awake"),
        ("score_reference", "-kv_cache -kv_cache -engine_weights +reference", "kv_cache goes to sleep asleep"),
        ("update", "-reference +actor +optimizer -critic", "critic moves, and should always be there"),
    ],
)
def test_whoever_leaves_the_table_is_told(watch: MemoryWatch, name: str, words: str, problem: str) -> None:
    assert any(problem in found for found in watch.problems([step_of(changed(name, words))]))


def test_who_never_sleeps_is_told(watch: MemoryWatch) -> None:
    """Although it is awake in every phase that needs it."""
    script = tuple((name, " ".join(w for w in words.split() if w[1:] != "reference")) for name, words in SCRIPT)
    found = watch.problems([step_of(script)])
    assert "step 1: reference never slept" in found and "step 1: reference never woke" in found


def test_a_second_step_begins_where_the_first_ended(watch: MemoryWatch) -> None:
    late = (("generate", ""), *changed("score_reference", "+reference")[1:])
    found = watch.problems([step_of(SCRIPT), step_of(late)])
    assert "step 2: reference wakes while kv_cache is awake" in found
    assert not [problem for problem in found if problem.startswith("step 1")]


def test_a_missing_phase_and_a_move_in_its_middle_are_told(watch: MemoryWatch) -> None:
    without = tuple((name if name != "score_reference" else "", words) for name, words in SCRIPT)
    assert "step 1: there was no score_reference" in watch.problems([step_of(without)])
    step = step_of(SCRIPT)
    longer = tuple(replace(span, end=span.end + 1.0) if span.name == "update" else span for span in step.phases)
    found = watch.problems([replace(step, phases=longer)])
    assert "step 1: optimizer moves in the middle of update" in found
