"""Residents of memory: what can be put to sleep and woken, in which order, and what was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from hybrid_rl.errors import MemoryStateError


@dataclass(frozen=True)
class Resident:
    """Something that occupies memory.

    tag: its name.
    num_bytes: its size while awake.
    sleep, wake: do the work; only the leases call them. None: it stays in memory. sleep receives tags: residents with
    the same function, because they have one owner, that go to sleep in one transition do so in one call.
    after: tags that, in a transition that moves both, wake before it and go to sleep after it.
    starts_awake: whether it is in memory when it is registered; always, if it cannot sleep.
    atomic: a sleep or wake that raises has changed nothing, so the transition can be undone.
    require_room: called right before wake; raises if the device has too little memory for it. It is for a wake that is
    not atomic, or is collective: before it the transition can still be undone, whichever rank lacks the memory.
    collective: a sleep or wake needs the other ranks. If it fails on one rank, the others may be stuck in it.
    """

    tag: str
    num_bytes: Callable[[], int]
    sleep: Callable[[frozenset[str]], None] | None = None
    wake: Callable[[], None] | None = None
    after: tuple[str, ...] = ()
    starts_awake: bool = False
    atomic: bool = False
    collective: bool = False
    require_room: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if (self.sleep is None) != (self.wake is None):
            raise ValueError(f"resident {self.tag!r} needs sleep and wake, or neither")


@dataclass(frozen=True)
class Transition:
    """One resident that went to sleep or woke.

    seconds: of the call; if it moves several, all with the first of them. start: when it began, in seconds since the
    epoch. num_bytes: that it takes while awake.
    """

    tag: str
    awake: bool
    seconds: float
    start: float
    num_bytes: int


@dataclass(frozen=True)
class Step:
    """One call of a transition. tags: the residents that it moves; none for giving memory back, and for a look at how
    much there is."""

    text: str
    tags: tuple[str, ...]
    wakes: bool
    action: Callable[[], None]
    atomic: bool
    collective: bool


def steps(
    residents: Mapping[str, Resident],
    order: Iterable[str],
    awake: frozenset[str],
    wanted: frozenset[str],
    give_back: Callable[[], None] | None,
) -> list[Step]:
    """Return what leads from the residents that are awake to those that are wanted: sleeps against the order, then
    `give_back` if something wakes, then wakes, each after a look at the room for it. Residents that cannot sleep do not
    count."""
    order = [tag for tag in order if residents[tag].wake is not None]
    leaving = [tag for tag in reversed(order) if tag in awake - wanted]
    coming = [tag for tag in order if tag in wanted - awake]
    sequence = []
    while leaving:
        sleep = residents[leaving[0]].sleep
        assert sleep is not None
        together = tuple(tag for tag in leaving if residents[tag].sleep == sleep)
        action = functools.partial(sleep, frozenset(together))
        sequence.append(_step(f"sleep of {' and '.join(map(repr, together))}", residents, together, False, action))
        leaving = [tag for tag in leaving if tag not in together]
    if coming and give_back is not None:
        sequence.append(Step("giving free memory back", (), True, give_back, atomic=False, collective=False))
    for tag in coming:
        wake, require_room = residents[tag].wake, residents[tag].require_room
        assert wake is not None
        if require_room is not None:
            sequence.append(Step(f"room for {tag!r}", (), True, require_room, atomic=True, collective=False))
        sequence.append(_step(f"wake of {tag!r}", residents, (tag,), True, wake))
    return sequence


def _step(
    text: str, residents: Mapping[str, Resident], tags: tuple[str, ...], wakes: bool, action: Callable[[], None]
) -> Step:
    moved = [residents[tag] for tag in tags]
    collective = any(resident.collective for resident in moved)
    return Step(text, tags, wakes, action, all(resident.atomic for resident in moved), collective)


def wake_order(residents: Mapping[str, Resident]) -> list[str]:
    """Return all tags, each after those in its `after`, otherwise by name: the same order on every rank. Raises
    MemoryStateError if residents wait for each other to wake."""
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
