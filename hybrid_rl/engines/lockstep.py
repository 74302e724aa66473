"""One engine on several ranks: each submits requests of its own, and all step together.

The ranks of a tensor-parallel replica compute every token together, so they must make the same calls in the same order.
What they want differs: it is exchanged at every step boundary and carried out, in the order of the ranks, by all of
them. No rank leads, and none has to know when another is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybrid_rl.engines.base import EngineStats, FinishedSample, PauseMode, RolloutEngine, RolloutRequest
from hybrid_rl.engines.guards import known_pause
from hybrid_rl.engines.wrapper import EngineWrapper
from hybrid_rl.errors import DataError, EngineStateError, PeerFailedError
from hybrid_rl.resharding.handoff.base import HandoffReport, Source


class PeerBrokeOffError(EngineStateError, PeerFailedError):
    """Another rank of those that share an engine broke off its rollout, which ended the requests of all."""


@dataclass
class Wishes:
    """What a rank wants at a step boundary.

    requests, aborted: under the ids of the shared engine. pauses: "resume" or a mode of pause, in order. num_to_come:
    requests that will be submitted later. broke_off: the rank ends the requests of everybody. version, fingerprint: of
    its weights, and of all tokens that it has seen.
    """

    requests: list[RolloutRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    pauses: list[PauseMode | Literal["resume"]] = field(default_factory=list)
    num_to_come: int = 0
    broke_off: bool = False
    version: int = -1
    fingerprint: int = 0

    @property
    def numbers(self) -> list[int]:
        """What a rank without requests, aborts or pauses wants: whether there is more, and the numbers."""
        has_more = bool(self.requests or self.aborted or self.pauses or self.broke_off)
        return [has_more, self.num_to_come, self.version, self.fingerprint]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Wishes:
        """The wishes that these numbers say all of."""
        _, num_to_come, version, fingerprint = numbers
        return cls(num_to_come=num_to_come, version=version, fingerprint=fingerprint)


class SharedEngine(EngineWrapper):
    """This rank's part in an engine that `num_ranks` ranks run together, each with its own copy or part of it.

    inner: this rank's; told to wait for num_ranks times as many requests as a rank may have waiting. rank, num_ranks:
    among those that share it. gather, gather_numbers: the objects of these ranks, and as many integers of each, in
    their order; all of them call it. Most steps exchange numbers only. fingerprint: of all tokens that inner has made;
    where it differs the ranks have sampled differently, and nothing they make is right.

    Ranks `announce` and `submit` what they have, perhaps nothing, and `step` until nothing is unfinished; `step` gives
    each the events of its own requests. All of them call `update_weights`, `sleep` and `wake`, between two steps.
    """

    def __init__(
        self,
        inner: RolloutEngine,
        *,
        rank: int,
        num_ranks: int,
        gather: Callable[[Any], list[Any]],
        gather_numbers: Callable[[Sequence[int]], list[list[int]]],
        fingerprint: Callable[[], int],
    ) -> None:
        super().__init__(inner)
        self.num_ranks, self._rank, self._fingerprint = num_ranks, rank, fingerprint
        self._gather, self._gather_numbers = gather, gather_numbers
        self._wishes = Wishes()
        self._num_unfinished = 0
        self._ids: set[int] = set()  # of this rank's requests

    # Ids are unique on a rank; with the rank as the last digit they are unique on all.
    def _shared(self, identity: int) -> int:
        return identity * self.num_ranks + self._rank

    # ------------------------------------------------------------------------------------------------ requests

    def check(self, requests: Sequence[RolloutRequest], version: int) -> None:
        """See RolloutEngine."""
        seen = set(self._ids)
        for request in requests:
            if request.id in seen:
                raise DataError(f"request id {request.id} is in use")
            seen.add(request.id)
        self._inner.check([*self._wishes.requests, *self._renamed(requests)], version)

    def _renamed(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        return [replace(request, id=self._shared(request.id)) for request in requests]

    def announce(self, num_requests: int) -> None:
        """See RolloutEngine."""
        self._wishes.num_to_come = num_requests
        self._num_unfinished = max(self._num_unfinished, 1)  # what the others have is known after the next boundary

    def submit(self, requests: Sequence[RolloutRequest], version: int) -> list[int]:
        """See RolloutEngine. The requests reach the engine at the next boundary."""
        self.check(requests, version)
        self._wishes.requests += self._renamed(requests)
        self._ids.update(request.id for request in requests)
        self._wishes.num_to_come = max(0, self._wishes.num_to_come - len(requests))
        return [request.id for request in requests]

    def abort(self, ids: Iterable[int]) -> None:
        """See RolloutEngine."""
        self._wishes.aborted += [self._shared(identity) for identity in self._ids & set(ids)]

    def pause(self, mode: PauseMode) -> None:
        """See RolloutEngine. It holds for the requests of all ranks."""
        self._wishes.pauses.append(known_pause(mode))

    def resume(self) -> None:
        """See RolloutEngine."""
        self._wishes.pauses.append("resume")

    @property
    def num_unfinished(self) -> int:
        """See RolloutEngine."""
        return self._num_unfinished + len(self._wishes.requests)

    # ---------------------------------------------------------------------------------------------------- step

    def step(self) -> list[FinishedSample]:
        """See RolloutEngine. Raises PeerBrokeOffError where another rank broke off, EngineStateError where ranks have
        diverged."""
        self._inner.require_ready(self.policy_version)
        num_to_come = self._exchange()
        try:
            events = self._inner.step()
        except BaseException:
            self._forget()
            raise
        mine = []
        for event in events:
            identity, rank = divmod(event.id, self.num_ranks)
            if rank == self._rank:
                self._ids.discard(identity)
                mine.append(replace(event, id=identity))
        self._num_unfinished = self._inner.num_unfinished + num_to_come
        return mine

    def _exchange(self) -> int:
        """Tell the others what this rank wants, and carry out what all want; the requests that are still to come."""
        mine = self._wishes
        mine.version, mine.fingerprint = self.policy_version, self._fingerprint()
        self._wishes = Wishes(num_to_come=mine.num_to_come)
        try:
            everybody = self._wishes_of_all(mine)
            self._check_agreement(everybody)
        except BaseException:
            self._forget()
            raise
        broke_off = [rank for rank, wishes in enumerate(everybody) if wishes.broke_off]
        if broke_off:
            self._forget()
            if self._inner.num_unfinished:
                self._inner.break_off()
            if not mine.broke_off:
                raise PeerBrokeOffError(
                    f"rank {broke_off[0]} of those that share this engine broke off its rollout, which ended the "
                    f"requests of all; why, is reported by that rank"
                )
            return 0
        if requests := [request for wishes in everybody for request in wishes.requests]:
            self._inner.submit(requests, self.policy_version)
        for wishes in everybody:
            for word in wishes.pauses:
                if word == "resume":
                    self._inner.resume()
                else:
                    self._inner.pause(word)
            self._inner.abort(wishes.aborted)
        num_to_come = sum(wishes.num_to_come for wishes in everybody)
        self._num_unfinished = self._inner.num_unfinished + num_to_come
        return num_to_come

    def _wishes_of_all(self, mine: Wishes) -> list[Wishes]:
        """Those of all ranks. In most steps numbers say all of them, and travel in a fraction of the time."""
        numbers = self._gather_numbers(mine.numbers)
        if any(has_more for has_more, *_ in numbers):
            found: list[Wishes] = self._gather(mine)
            return found
        return [Wishes.of_numbers(row) for row in numbers]

    def _forget(self) -> None:
        """Nothing is unfinished any more: whoever has failed must not wait for the others at another boundary."""
        self._wishes, self._num_unfinished = Wishes(), 0
        self._ids.clear()

    def _check_agreement(self, everybody: Sequence[Wishes]) -> None:
        for name, words in (("version", "hold policy versions"), ("fingerprint", "sampled different tokens:")):
            values = [getattr(wishes, name) for wishes in everybody]
            if len(set(values)) > 1:
                raise EngineStateError(f"the ranks that share this engine {words} {values}; nothing they make is right")

    def break_off(self) -> None:
        """See RolloutEngine."""
        self._wishes = Wishes(broke_off=True)
        self._exchange()

    # --------------------------------------------------------------------------------------- weights and memory

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """See RolloutEngine. What ranks wanted since their last step, a pause above all, holds from here."""
        self._exchange()
        return super().update_weights(source, version)

    def sleep(self, tags: Iterable[str]) -> None:
        """See RolloutEngine. What ranks wanted since their last step, a pause above all, holds from here."""
        self._exchange()
        super().sleep(tags)

    def stats(self) -> EngineStats:
        """See RolloutEngine. Counts are of the requests of all ranks, but for what this one may submit."""
        stats = self._inner.stats()
        waiting = len(self._wishes.requests)
        return replace(
            stats,
            num_waiting=stats.num_waiting + waiting,
            num_queueable=max(0, stats.num_queueable // self.num_ranks - waiting),
        )
