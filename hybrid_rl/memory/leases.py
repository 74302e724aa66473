"""Residents of memory, and the state machine that puts them to sleep and wakes them.

A worker method leases the tags it needs. Residents that are not leased go to sleep first, then the leased ones wake, so
the two are never in memory together; in between, the allocator returns its free memory to the device. No method calls
sleep or wake by hand, so a step that skips something cannot leave a resident in the wrong state.

With several ranks a move may be a collective (unsharding weights), and half a group must not lose what the other half
still reads: the ranks agree on every lease before any of them moves anything, and all move residents in the same order.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.process.interrupts import deferred_interrupt


@dataclass(frozen=True)
class Resident:
    """Something that occupies memory.

    tag: its name.
    num_bytes: its size while awake.
    sleep, wake: do the work; only the leases call them. None: it stays in memory. sleep receives tags: residents with
    the same function, because they have one owner, that go to sleep in one transition do so in one call.
    after: tags that, in a transition that moves both, wake before it and go to sleep after it.
    starts_awake: whether it is in memory when it is registered; always, if it cannot sleep.
    """

    tag: str
    num_bytes: Callable[[], int]
    sleep: Callable[[frozenset[str]], None] | None = None
    wake: Callable[[], None] | None = None
    after: tuple[str, ...] = ()
    starts_awake: bool = False

    def __post_init__(self) -> None:
        if (self.sleep is None) != (self.wake is None):
            raise ValueError(f"resident {self.tag!r} needs sleep and wake, or neither")


@dataclass(frozen=True)
class Transition:
    """One resident going to sleep or waking. seconds: of the call; if it moves several, all with the first of them."""

    tag: str
    awake: bool
    seconds: float


class Leases:
    """The residents of this process and their state.

    gather: returns the objects of all ranks, in rank order; None = one rank. It is called once per outermost lease, so
    all ranks of a group must take their leases together.
    give_back: called once in every transition that wakes something, between the last sleep and the first wake. It is
    for an allocator that keeps freed memory, if waking residents take theirs from the device itself.
    """

    def __init__(
        self,
        residents: Iterable[Resident] = (),
        gather: Callable[[Any], list[Any]] | None = None,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        self._residents: dict[str, Resident] = {}
        self._order: list[str] = []
        self._gather, self._give_back = gather, give_back
        self._awake: set[str] = set()
        self._leased: frozenset[str] | None = None
        self._broken: str | None = None
        self._transitions: list[Transition] = []
        for resident in residents:
            self.add(resident)

    def add(self, resident: Resident) -> None:
        """Register a resident. Raises MemoryStateError if its tag exists, or if residents wait for each other to
        wake."""
        if resident.tag in self._residents:
            raise MemoryStateError(f"resident {resident.tag!r} is already registered")
        residents = self._residents | {resident.tag: resident}
        self._order = _wake_order(residents)
        self._residents = residents
        if resident.wake is None or resident.starts_awake:
            self._awake.add(resident.tag)

    @property
    def awake(self) -> frozenset[str]:
        """Tags in memory now."""
        return frozenset(self._awake)

    def resident_bytes(self) -> dict[str, int]:
        """Return bytes in memory now, by tag; 0 for residents that sleep."""
        return {tag: resident.num_bytes() if tag in self._awake else 0 for tag, resident in self._residents.items()}

    @contextmanager
    def lease(self, tags: Iterable[str]) -> Iterator[None]:
        """Keep these tags in memory inside the block, and let all other residents that can sleep do so.

        They stay awake after the block until another lease puts them to sleep: a lease taken twice in a row moves
        nothing. A lease inside another may only ask for tags that the outer one holds.

        Raises MemoryStateError for an unknown tag, for more than an outer lease holds, and after a failed transition;
        with several ranks also if they do not agree, or if any of them cannot take part. It is then raised on all
        ranks, and nothing has moved.
        """
        wanted = frozenset(tags)
        outer = self._leased
        if outer is not None:
            if problem := self._problem(wanted):
                raise MemoryStateError(problem)
            if wanted - outer:
                raise MemoryStateError(
                    f"cannot lease {sorted(wanted - outer)} while a lease on {sorted(outer)} is active"
                )
            yield
            return
        self._agree(wanted)
        # A Ctrl-C in the middle of a transition would leave memory half moved, so it is deferred.
        with deferred_interrupt():
            self._move_to(wanted)
        self._leased = wanted
        try:
            yield
        finally:
            self._leased = None

    def _problem(self, wanted: frozenset[str]) -> str | None:
        unknown = sorted(wanted - set(self._residents))
        if unknown:
            return f"residents {unknown} do not exist; the registered ones are {sorted(self._residents)}"
        if self._broken is not None:
            return f"memory is in an unknown state since this failure: {self._broken}"
        return None

    def _agree(self, wanted: frozenset[str]) -> None:
        problem = self._problem(wanted)
        if self._gather is None:
            if problem:
                raise MemoryStateError(problem)
            return
        # A rank with a problem takes part as well, because the others would wait for it.
        mine = {"registered": self._order, "wanted": sorted(wanted), "awake": sorted(self._awake)}
        answers: list[tuple[str | None, dict[str, list[str]]]] = self._gather((problem, mine))
        problems = [f"rank {rank}: {theirs}" for rank, (theirs, _) in enumerate(answers) if theirs]
        if problems:
            raise MemoryStateError(f"nothing was moved in memory on any rank: {'; '.join(problems)}")
        for what in mine:
            values = [tuple(state[what]) for _, state in answers]
            if len(set(values)) > 1:
                told = "; ".join(f"{_ranks_with(values, value)}: {list(value)}" for value in dict.fromkeys(values))
                raise MemoryStateError(
                    f"nothing was moved in memory on any rank, because the ranks differ in what is {what}: {told}; "
                    f"every rank must make the same calls"
                )

    def _move_to(self, wanted: frozenset[str]) -> None:
        leaving = [tag for tag in reversed(self._order) if tag in self._awake - wanted and self._residents[tag].wake]
        coming = [tag for tag in self._order if tag in wanted - self._awake]
        while leaving:
            sleep = self._residents[leaving[0]].sleep
            assert sleep is not None
            together = [tag for tag in leaving if self._residents[tag].sleep == sleep]
            what = f"sleep of {' and '.join(map(repr, together))}"
            seconds = self._do(what, functools.partial(sleep, frozenset(together)))
            self._awake.difference_update(together)
            self._transitions += [Transition(tag, False, 0.0 if at else seconds) for at, tag in enumerate(together)]
            leaving = [tag for tag in leaving if tag not in together]
        if coming and self._give_back is not None:
            self._do("giving free memory back", self._give_back)
        for tag in coming:
            wake = self._residents[tag].wake
            assert wake is not None
            seconds = self._do(f"wake of {tag!r}", wake)
            self._awake.add(tag)
            self._transitions.append(Transition(tag, True, seconds))

    def _do(self, what: str, action: Callable[[], None]) -> float:
        """Carry out a part of a transition and return its seconds."""
        start = time.perf_counter()
        try:
            action()
        except BaseException as error:
            # Half-moved memory must not be used: every later lease refuses and names the first cause.
            self._broken = f"{what}: {type(error).__name__}: {error}"
            raise
        return time.perf_counter() - start

    def drain_transitions(self) -> list[Transition]:
        """Return the transitions since the last call, oldest first."""
        moved, self._transitions = self._transitions, []
        return moved


def _wake_order(residents: Mapping[str, Resident]) -> list[str]:
    """Return all tags, each after those in its `after`, otherwise by name: the same order on every rank."""
    sorter = TopologicalSorter({tag: set(item.after) & set(residents) for tag, item in residents.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        raise MemoryStateError(f"residents wait for each other to wake: {' -> '.join(error.args[1])}") from None
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return order


def _ranks_with(values: Sequence[object], value: object) -> str:
    ranks = [rank for rank, other in enumerate(values) if other == value]
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
