"""Random residents, leases and failures on one to three ranks: nothing is left half moved, no rank waits for ever, and
all ranks end in one state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_rl.errors import MemoryRefusedError, MemoryStateError
from hybrid_rl.memory.leases import Leases, Resident
from tests.support.inside.memory import leased_tags

TAGS = "abcde"
KINDS = ("atomic", "owned", "delicate", "collective", "roomy", "fixed")
LIMIT_SECONDS = 20.0


@dataclass
class Group:
    """What ranks share. Its ranks wait for each other in `meet`; `end` is what a controller does after a failure."""

    num_ranks: int

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.num_ranks, timeout=LIMIT_SECONDS)
        self._said: list[Any] = [None] * self.num_ranks

    def gather(self, rank: int, mine: Any) -> list[Any]:
        self._said[rank] = mine
        self._barrier.wait()
        everyone = list(self._said)
        self._barrier.wait()  # before anyone says the next thing
        return everyone

    def end(self) -> None:
        self._barrier.abort()


@dataclass
class Machine:
    """A rank's memory. fails: the numbers of the moves that fail, counted over all residents."""

    rank: int
    group: Group
    kinds: dict[str, str]
    fails: dict[int, type[BaseException]]
    present: set[str] = field(default_factory=set)
    half: set[str] = field(default_factory=set)
    allowed: list[frozenset[str]] = field(default_factory=list)
    num_moves: int = 0
    fired: list[tuple[str, bool]] = field(default_factory=list)  # the move, and whether it can be undone

    def leases(self, after: dict[str, tuple[str, ...]]) -> Leases:
        residents = []
        for tag, kind in self.kinds.items():
            if kind == "fixed":
                residents.append(Resident(tag, lambda: 1))
                continue
            sleep = self._sleep_owned if kind == "owned" else self._sleep_of(tag)
            atomic, collective = kind in ("atomic", "owned"), kind == "collective"
            room = self._room_of(tag) if kind in ("roomy", "collective") else None
            wake = self._wake_of(tag)
            residents.append(Resident(tag, lambda: 1, sleep, wake, after[tag], False, atomic, collective, room))
        several = self.group.num_ranks > 1
        return Leases(residents, (lambda mine: self.group.gather(self.rank, mine)) if several else None)

    def _sleep_owned(self, tags: frozenset[str]) -> None:
        self._move("sleep", tags, "owned")

    def _sleep_of(self, tag: str) -> Callable[[frozenset[str]], None]:
        def sleep(tags: frozenset[str]) -> None:
            assert tags == {tag}
            self._move("sleep", tags, self.kinds[tag])

        return sleep

    def _wake_of(self, tag: str) -> Callable[[], None]:
        return lambda: self._move("wake", frozenset({tag}), self.kinds[tag])

    def _room_of(self, tag: str) -> Callable[[], None]:
        def require_room() -> None:
            assert tag not in self.present
            self.num_moves += 1
            if error := self.fails.get(self.num_moves):
                self.fired.append((f"room {tag}", True))
                raise error("injected")

        return require_room

    def _move(self, verb: str, tags: frozenset[str], kind: str) -> None:
        assert (tags <= self.present) if verb == "sleep" else not (tags & self.present)
        self.num_moves += 1
        if error := self.fails.get(self.num_moves):
            can_undo = kind in ("atomic", "owned")
            self.fired.append((f"{verb} {sorted(tags)}", can_undo))
            if not can_undo:
                self.half |= tags
            raise error("injected")
        if kind == "collective" and self.group.num_ranks > 1:
            met = self.group.gather(self.rank, (verb, tags))
            assert met == [(verb, tags)] * self.group.num_ranks, "ranks are in different collectives"
        self.present ^= tags
        if verb == "wake":  # what leaves has left: never both sides of a transition in memory
            assert any(self.present <= allowed for allowed in self.allowed)


@dataclass
class Told:
    """How one lease ended on a rank, and its state then."""

    outcome: str
    awake: frozenset[str]
    moves: list[tuple[str, bool]]
    fired: list[tuple[str, bool]]


def play(machine: Machine, leases: Leases, wanted: list[frozenset[str]]) -> list[Told]:
    """Take one lease after the other, until memory breaks."""
    history = []
    movable = {tag for tag, kind in machine.kinds.items() if kind != "fixed"}
    fixed = machine.kinds.keys() - movable
    for tags in wanted:
        before, moves_before = leases.awake, machine.num_moves
        machine.allowed, machine.fired = [tags, before], []
        outcome = "held"
        try:
            with leases.lease(tags):
                assert machine.present == tags & movable
                with leases.lease(tags & fixed):
                    pass
        except (MemoryRefusedError, KeyboardInterrupt):
            outcome = "refused" if leases.broken is None else "broken"
            assert outcome == "broken" or leases.awake == before
        except (MemoryStateError, OSError):
            outcome = "broken"
            assert leases.broken is not None
        except threading.BrokenBarrierError:
            outcome = "broken"  # another rank failed while this one was still on its way out of the first gather
            assert leases.broken is not None or machine.num_moves == moves_before
        moves = [(t.tag, t.awake) for t in leases.drain_transitions()]
        history.append(Told(outcome, leases.awake, moves, machine.fired))
        if outcome == "broken":
            assert leased_tags(leases) is None
            machine.group.end()
            break
        assert machine.present == leases.awake & movable and leases.awake - movable == fixed and not machine.half
    return history


@st.composite
def games(draw: st.DrawFn) -> tuple[Any, ...]:
    tags = TAGS[: draw(st.integers(2, len(TAGS)))]
    kinds = {tag: draw(st.sampled_from(KINDS)) for tag in tags}
    after = {tag: tuple(draw(st.sets(st.sampled_from(tags[:at])))) if at else () for at, tag in enumerate(tags)}
    num_ranks = draw(st.integers(1, 3))
    errors = st.sampled_from([OSError, KeyboardInterrupt])
    fails = [draw(st.dictionaries(st.integers(1, 16), errors, max_size=3)) for _ in range(num_ranks)]
    wanted = draw(st.lists(st.frozensets(st.sampled_from(tags)), min_size=1, max_size=7))
    return kinds, after, fails, wanted


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(games())
def test_whatever_is_leased_and_fails(game: tuple[Any, ...]) -> None:
    check(*game)


def check(
    kinds: dict[str, str],
    after: dict[str, tuple[str, ...]],
    fails: list[dict[int, type[BaseException]]],
    wanted: list[frozenset[str]],
) -> list[list[Told]]:
    group = Group(len(fails))
    machines = [Machine(rank, group, kinds, theirs) for rank, theirs in enumerate(fails)]
    histories: list[Any] = [None] * len(machines)

    def run(machine: Machine) -> None:
        try:
            histories[machine.rank] = play(machine, machine.leases(after), wanted)
        except BaseException as error:  # noqa: BLE001 - of an assertion, told by the main thread
            histories[machine.rank] = error
            group.end()

    threads = [threading.Thread(target=run, args=(machine,), daemon=True) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)
    for history in histories:
        assert history is not None, "a rank waits for ever"
        if isinstance(history, BaseException):
            raise history
    at_once = zip(*histories, strict=True)  # no rank ends before the others
    for number, ranks in enumerate(at_once):
        fired = [failure for told in ranks for failure in told.fired]
        moves = {move for move, _ in fired}
        expected = (
            "held" if not fired else "refused" if len(moves) == 1 and all(undo for _, undo in fired) else "broken"
        )
        assert [told.outcome for told in ranks] == [expected] * len(ranks), number
        if expected != "broken":
            assert len({told.awake for told in ranks}) == 1
        if expected == "held":
            assert all(told.moves == ranks[0].moves for told in ranks)
    return histories


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_each_single_failure_of_a_swap_is_undone(num_ranks: int, at: int) -> None:
    """Two leave and two come: four moves, each failing once on the last rank."""
    fails: list[dict[int, type[BaseException]]] = [{} for _ in range(num_ranks)]
    fails[-1] = {2 + at: OSError}
    wanted = [frozenset("ab"), frozenset("cd"), frozenset("cd"), frozenset("ab")]
    histories = check(dict.fromkeys("abcd", "atomic"), dict.fromkeys("abcd", ()), fails, wanted)
    assert [told.outcome for told in histories[0]] == ["held", "refused", "held", "held"]
    # The last rank has done at - 1 moves and undone them; the others one more each way.
    assert [len(history[1].moves) for history in histories] == [2 * at] * (num_ranks - 1) + [2 * (at - 1)]


@pytest.mark.parametrize("kind", ["roomy", "collective"])
@pytest.mark.parametrize(("at", "num_done"), [(1, 1), (3, 2)])
def test_a_lack_of_room_that_one_rank_sees_before_a_wake_is_undone_on_all(kind: str, at: int, num_done: int) -> None:
    """b and c cannot be undone once they move: looked for room, moved, looked for room, moved."""
    kinds = {"a": "atomic", "b": kind, "c": kind}
    wanted = [frozenset("a"), frozenset("bc"), frozenset("bc"), frozenset("a")]
    histories = check(kinds, dict.fromkeys("abc", ()), [{}, {2 + at: OSError}], wanted)
    for history in histories:
        assert [told.outcome for told in history] == ["held", "refused", "held", "held"]
        there = [("a", False), ("b", True)][:num_done]
        back = [(tag, not awake) for tag, awake in reversed(there)]
        assert history[1].moves == there + back
