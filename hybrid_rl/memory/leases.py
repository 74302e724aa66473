"""Who is in memory: residents, and the one state machine that puts them to sleep and wakes them.

A worker method leases the tags it needs. What is not leased goes to sleep first, then what is leased wakes, so that the
two are never in memory together. No method calls sleep or wake by hand, and a generator can therefore not be left
asleep or awake by a step that skipped something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.interrupts import deferred_interrupt

Policy = Literal["keep", "discard", "offload"]


@dataclass(frozen=True)
class Resident:
    """Something that occupies memory.

    tag: its name. num_bytes: its size while awake. policy: what sleep does with it: keep (it never sleeps), discard
    (its content is lost), offload (its content comes back). sleep and wake do the work and are called by the leases
    alone.
    """

    tag: str
    num_bytes: Callable[[], int]
    policy: Policy = "keep"
    sleep: Callable[[], None] | None = None
    wake: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.policy != "keep" and (self.sleep is None or self.wake is None):
            raise ValueError(f"resident {self.tag!r} with policy={self.policy} needs sleep and wake")


@dataclass(frozen=True)
class Transition:
    """One resident going to sleep or waking."""

    tag: str
    awake: bool
    num_bytes: int
    seconds: float


class Leases:
    """The residents of this process and their state. Residents with a policy other than keep start asleep."""

    def __init__(self, residents: Iterable[Resident] = ()) -> None:
        self._residents: dict[str, Resident] = {}
        self._awake: set[str] = set()
        self._leased: frozenset[str] | None = None
        self._broken: str | None = None
        self.transitions: list[Transition] = []
        for resident in residents:
            self.add(resident)

    def add(self, resident: Resident) -> None:
        """Register a resident; a tag names one resident only."""
        if resident.tag in self._residents:
            raise MemoryStateError(f"resident {resident.tag!r} is registered already")
        self._residents[resident.tag] = resident
        if resident.policy == "keep":
            self._awake.add(resident.tag)

    @property
    def awake(self) -> frozenset[str]:
        """Tags in memory now."""
        return frozenset(self._awake)

    def resident_bytes(self) -> dict[str, int]:
        """Bytes in memory now, by tag; 0 for what sleeps."""
        return {tag: resident.num_bytes() if tag in self._awake else 0 for tag, resident in self._residents.items()}

    @contextmanager
    def lease(self, tags: Iterable[str]) -> Iterator[None]:
        """Have these tags, and none of the sleepable others, in memory inside the block.

        They stay awake behind it, until another lease wants them gone: a lease taken twice in a row moves nothing. A
        lease inside another may only ask for what that one holds. Raises MemoryStateError for an unknown tag, for more
        than an outer lease holds, and after a transition that failed.
        """
        wanted = frozenset(tags)
        unknown = sorted(wanted - set(self._residents))
        if unknown:
            raise MemoryStateError(f"residents {unknown} do not exist; there are {sorted(self._residents)}")
        if self._broken is not None:
            raise MemoryStateError(f"memory is in an unknown state since this failed: {self._broken}")
        outer = self._leased
        if outer is not None:
            if wanted - outer:
                raise MemoryStateError(
                    f"a lease on {sorted(outer)} is held; {sorted(wanted - outer)} cannot be had inside it"
                )
            yield
            return
        # A Ctrl-C in the middle of a transition would leave memory half moved: it waits for the end.
        with deferred_interrupt():
            self._move_to(wanted)
        self._leased = wanted
        try:
            yield
        finally:
            self._leased = None

    def _move_to(self, wanted: frozenset[str]) -> None:
        for tag in sorted(self._awake - wanted):
            if self._residents[tag].policy != "keep":
                self._move(tag, awake=False)
        for tag in sorted(wanted - self._awake):
            self._move(tag, awake=True)

    def _move(self, tag: str, *, awake: bool) -> None:
        resident = self._residents[tag]
        action = resident.wake if awake else resident.sleep
        assert action is not None
        start = time.perf_counter()
        try:
            action()
        except BaseException as error:
            # Half-moved memory must not be used: every later lease refuses, naming the first cause.
            self._broken = f"{'wake' if awake else 'sleep'} of {tag!r}: {type(error).__name__}: {error}"
            raise
        (self._awake.add if awake else self._awake.discard)(tag)
        self.transitions.append(Transition(tag, awake, resident.num_bytes(), time.perf_counter() - start))

    def drain_transitions(self) -> list[Transition]:
        """Transitions since the last call, oldest first."""
        moved, self.transitions = self.transitions, []
        return moved
