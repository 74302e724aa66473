"""The state machine that puts residents of memory to sleep and wakes them.

A worker method leases the tags it needs. Residents that are not leased go to sleep first, then the leased ones wake, so
the two are never in memory together; in between, the allocator returns its free memory to the device. No method calls
sleep or wake by hand, so a step that skips something cannot leave a resident in the wrong state.

With several ranks a move may be a collective (unsharding weights), and half a group must not lose what the other half
still reads: the ranks agree on every lease before any of them moves anything, all move residents in the same order, and
each tells the others how a move ended before they go on to the next.

A lease that cannot be had is either refused, or breaks memory. Refused (MemoryRefusedError): nothing has moved, or
everything was put back, on all ranks; work can go on. Broken: a move failed in the middle of something that cannot be
undone, and every later lease is refused on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hybrid_rl.errors import MemoryRefusedError, MemoryStateError
from hybrid_rl.memory.agreement import Agreement, DisagreementError, Failure, PeerBrokenError, PeerRefusedError, told
from hybrid_rl.memory.byte_sizes import size_text
from hybrid_rl.memory.residents import Resident, Step, Transition, steps, wake_order
from hybrid_rl.process.interrupts import deferred_interrupt

__all__ = ["Lease", "Leases", "Resident", "Transition"]

MORE_ROOM = (
    "to make room, name more residents in memory.offload, or lower rollout.kv_cache_memory_bytes or "
    "optimizer.tokens_per_micro_batch"
)


class Leases:
    """The residents of this process and their state.

    gather: returns the objects of all ranks, in rank order; None = one rank. It is called once per outermost lease, and
    once per move, so all ranks of a group must take their leases together.
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
        self._agreement, self._give_back = Agreement(gather), give_back
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
        self._order = wake_order(residents)
        self._residents = residents
        if resident.wake is None or resident.starts_awake:
            self._awake.add(resident.tag)

    @property
    def awake(self) -> frozenset[str]:
        """Tags in memory now."""
        return frozenset(self._awake)

    @property
    def broken(self) -> str | None:
        """The failure since which memory is in an unknown state; None: there was none."""
        return self._broken

    def resident_bytes(self) -> dict[str, int]:
        """Return bytes in memory now, by tag; 0 for residents that sleep."""
        return {tag: resident.num_bytes() if tag in self._awake else 0 for tag, resident in self._residents.items()}

    def drain_transitions(self) -> list[Transition]:
        """Return the transitions since the last call, oldest first; those that were undone too, and their undoing."""
        moved, self._transitions = self._transitions, []
        return moved

    def rescue(self, tags: Iterable[str]) -> None:
        """Wake residents that sleep, whatever has become of memory, without the other ranks: for what must outlive it.
        Raises what their wake raises."""
        for tag in self._order:
            resident = self._residents[tag]
            if tag in tags and tag not in self._awake and resident.wake is not None:
                resident.wake()
                self._awake.add(tag)

    def lease(self, tags: Iterable[str]) -> Lease:
        """Keep these tags in memory inside the block, and let all other residents that can sleep do so.

        They stay awake after the block until another lease puts them to sleep: a lease taken twice in a row moves
        nothing. A lease inside another may only ask for tags that the outer one holds.

        The block raises MemoryRefusedError for an unknown tag, for more than an outer lease holds, and for a move that
        failed and was undone; with several ranks also if they do not agree, or if any of them cannot take part, on all
        ranks. If memory breaks, it raises what broke it, other ranks a MemoryStateError, as all do from then on.
        """
        return Lease(self, frozenset(tags))

    def _begin(self, wanted: frozenset[str]) -> bool:
        """Take a lease; returns whether it is an outermost one, which is to be ended."""
        problem = self._problem(wanted)
        if (outer := self._leased) is not None:
            if problem is None and wanted - outer:
                text = f"cannot lease {sorted(wanted - outer)} while a lease on {sorted(outer)} is active"
                problem = Failure(text, is_final=False)
            if problem is not None:
                raise _error_of(problem.text, problem.is_final)
            return False
        facts = {"registered": self._order, "wanted": sorted(wanted), "awake": sorted(self._awake)}
        nothing_moved = "nothing was moved in memory on any rank"
        try:
            failures = self._agreement.on(facts, problem)
        except DisagreementError as error:
            raise MemoryRefusedError(f"{nothing_moved}, because {error}; every rank must make the same calls") from None
        if failures:
            text = f"{nothing_moved}: {told(failures)}" if self._agreement.has_peers else failures[0].text
            raise _error_of(text, any(failure.is_final for failure in failures.values()))
        # Ctrl-C in the middle of a transition would leave memory half moved: it is deferred, however often it comes.
        with deferred_interrupt(every=True):
            self._move_to(wanted)
        self._leased = wanted
        return True

    def _problem(self, wanted: frozenset[str]) -> Failure | None:
        if self._broken is not None:
            return Failure(f"memory is in an unknown state since this failure: {self._broken}", is_final=True)
        if unknown := sorted(wanted - set(self._residents)):
            text = f"residents {unknown} do not exist; the registered ones are {sorted(self._residents)}"
            return Failure(text, is_final=False)
        return None

    def _move_to(self, wanted: frozenset[str]) -> None:
        """Carry out a transition, or undo it and raise."""
        before = self.awake
        stopped = self._walk(wanted)
        if stopped is None:
            return
        try:
            again = self._walk(before)
            if again is not None:
                raise self._breaks(again.text, again.error)
        except BaseException as error:
            self._broken = f"{stopped.text}; then, while memory was put back, {self._broken}"
            error.add_note(f"memory is in an unknown state since this failure: {self._broken}")
            raise
        text = f"{stopped.text}; memory was put back as it was before, and work can go on. {stopped.held}"
        if stopped.while_waking:
            text += f"; {MORE_ROOM}"
        if stopped.error is None:
            raise PeerRefusedError(text)
        if not isinstance(stopped.error, Exception):
            raise stopped.error
        raise MemoryRefusedError(text) from stopped.error

    def _walk(self, wanted: frozenset[str]) -> _Stop | None:
        """Move everything; returns what stopped it, if all moves before that one can be undone, and that one has been.
        Otherwise memory breaks."""
        for step in steps(self._residents, self._order, self.awake, wanted, self._give_back):
            error = self._do(step)
            failure = None if error is None else Failure(_text_of(step, error), is_final=not step.atomic)
            if error is not None and step.collective and self._agreement.has_peers:
                # The others may be stuck in it and cannot listen. Their controller ends them.
                raise self._breaks(_text_of(step, error), error)
            if failures := self._agree(step.text, failure):
                text = self._told(failures)
                if any(theirs.is_final for theirs in failures.values()):
                    raise self._breaks(text, error)
                stop = _Stop(text, step.wakes, error, self._held())
                if self._agreement.has_peers:
                    self._level(step, stop)
                return stop
        return None

    def _level(self, step: Step, stop: _Stop) -> None:
        """Undo a step that other ranks could not do, so that all are in one state."""
        error = None
        if stop.error is None:
            before = self.awake ^ set(step.tags)
            # Neither collective nor to be agreed on: not all ranks have done the step.
            for back in steps(self._residents, self._order, self.awake, before, self._give_back):
                error = error or self._do(back)
        text = f"undoing {step.text}"
        failure = None if error is None else Failure(f"{text}: {type(error).__name__}: {error}", is_final=True)
        if failures := self._agree(text, failure):
            raise self._breaks(f"{stop.text}; then {self._told(failures)}", error)

    def _agree(self, text: str, failure: Failure | None) -> dict[int, Failure]:
        try:
            return self._agreement.on({"moved": [text]}, failure)
        except BaseException as error:
            # How the other ranks have fared is not known.
            raise self._breaks(f"{text}: {type(error).__name__}: {error}", error) from None

    def _told(self, failures: dict[int, Failure]) -> str:
        return told(failures) if self._agreement.has_peers else failures[0].text

    def _breaks(self, text: str, error: BaseException | None) -> BaseException:
        """Refuse all leases from now on, because half-moved memory must not be used. Returns what is to be raised:
        `error`, or if that is another rank's, one that says so."""
        self._broken = text
        return error or PeerBrokenError(f"memory is in an unknown state since this failure: {text}")

    def _do(self, step: Step) -> BaseException | None:
        """Carry out a part of a transition; returns what it raised."""
        wall, start = time.time(), time.perf_counter()
        try:
            sizes = {} if step.wakes else {tag: self._residents[tag].num_bytes() for tag in step.tags}
            step.action()
        except BaseException as error:  # noqa: BLE001 - an interrupt too leaves memory as it is, and is raised later
            return error
        seconds = time.perf_counter() - start
        (self._awake.update if step.wakes else self._awake.difference_update)(step.tags)
        for at, tag in enumerate(step.tags):
            size = self._residents[tag].num_bytes() if step.wakes else sizes[tag]
            self._transitions.append(Transition(tag, step.wakes, 0.0 if at else seconds, wall, size))
        return None

    def _held(self) -> str:
        sizes = self.resident_bytes()
        held = ", ".join(f"{tag} {size_text(sizes[tag])}" for tag in sorted(self._awake))
        return f"In memory were {held or 'nothing else'}"


class Lease(AbstractContextManager[None]):
    """A block of `Leases.lease`. A class, because an interrupt in the `__enter__` of a generator would leave the lease
    taken."""

    def __init__(self, leases: Leases, wanted: frozenset[str]) -> None:
        self._leases, self._wanted = leases, wanted
        self._is_outermost = False

    def __enter__(self) -> None:
        is_inner = self._leases._leased is not None
        try:
            self._is_outermost = self._leases._begin(self._wanted)
        except BaseException:
            if not is_inner:
                self._leases._leased = None
            raise

    def __exit__(self, *_: object) -> None:
        if self._is_outermost:
            self._leases._leased = None

    def end(self) -> None:
        """End the lease once more, after its block: a Ctrl-C that does not wait may have come as `__exit__` began."""
        if self._is_outermost:
            self._leases._leased = None


@dataclass(frozen=True)
class _Stop:
    """A move that failed. error: of this rank. held: who had which memory then."""

    text: str
    while_waking: bool
    error: BaseException | None
    held: str


def _text_of(step: Step, error: BaseException) -> str:
    return f"{step.text}: {type(error).__name__}: {error}"


def _error_of(text: str, is_final: bool) -> MemoryStateError:
    return MemoryStateError(text) if is_final else MemoryRefusedError(text)
