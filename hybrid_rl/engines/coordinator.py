"""Step messages of the ranks that share an engine by tensor parallelism.

These ranks compute every token together, so they must make the same calls in the same order. What they ask for differs:
it is exchanged at every step boundary and carried out by all of them, in the order of the ranks. No rank leads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybrid_rl.engines.base import FinishedSample, RolloutRequest
from hybrid_rl.errors import EngineStateError, PeerFailedError


class PeerAbortedError(EngineStateError, PeerFailedError):
    """Another rank of those that share an engine ended its rollout early, which ended the requests of all."""


@dataclass
class StepMessage:
    """What a rank asks for at a step boundary.

    requests, aborted: under the ids of the shared engine. num_expected: requests that this rank will submit later.
    is_open: it is inside a session, and may submit more. aborts_all: it ended the requests of everybody. version,
    fingerprint: of its weights, and of all tokens that it has seen.
    """

    requests: list[RolloutRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    num_expected: int = 0
    is_open: bool = False
    aborts_all: bool = False
    version: int = -1
    fingerprint: int = 0

    @property
    def numbers(self) -> list[int]:
        """All that a rank without requests and aborts has to say; first, whether there is more."""
        has_more = bool(self.requests or self.aborted or self.aborts_all)
        return [has_more, self.num_expected, self.is_open, self.version, self.fingerprint]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> StepMessage:
        """Return the message that consists of these numbers."""
        _, num_expected, is_open, version, fingerprint = numbers
        return cls(num_expected=num_expected, is_open=bool(is_open), version=version, fingerprint=fingerprint)


class Coordinator:
    """This rank among the `num_ranks` ranks that run an engine together, each with its own copy or part of it.

    gather, gather_numbers: the objects of these ranks, and as many integers of each, in their order; all ranks call it.
    Most steps exchange numbers only, in a fraction of the time. fingerprint: of all tokens that this rank's engine has
    made; if it differs between ranks they have sampled differently, and their samples are invalid.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        gather: Callable[[Any], list[Any]],
        gather_numbers: Callable[[Sequence[int]], list[list[int]]],
        fingerprint: Callable[[], int],
    ) -> None:
        self.rank, self.num_ranks, self._fingerprint = rank, num_ranks, fingerprint
        self._gather, self._gather_numbers = gather, gather_numbers

    @classmethod
    def alone(cls) -> Coordinator:
        """Return the coordinator of an engine that is not shared."""
        return cls(
            rank=0,
            num_ranks=1,
            gather=lambda message: [message],
            gather_numbers=lambda numbers: [[*numbers]],
            fingerprint=lambda: 0,
        )

    # Ids are unique on a rank; with the rank as the last digit they are unique on all.
    def shared_id(self, identity: int) -> int:
        """Return the id in the shared engine of a request of this rank."""
        return identity * self.num_ranks + self.rank

    def own(self, events: Sequence[FinishedSample]) -> list[FinishedSample]:
        """Return the events of this rank's requests, under its own ids."""
        parted = [(event, *divmod(event.id, self.num_ranks)) for event in events]
        return [replace(event, id=identity) for event, identity, rank in parted if rank == self.rank]

    def exchange(self, mine: StepMessage, version: int) -> list[StepMessage]:
        """Exchange messages: return those of all ranks, in their order. Collective. version: of this rank's weights."""
        mine.version, mine.fingerprint = version, self._fingerprint()
        numbers = self._gather_numbers(mine.numbers)
        if any(has_more for has_more, *_ in numbers):
            messages: list[StepMessage] = self._gather(mine)
            return messages
        return [StepMessage.of_numbers(row) for row in numbers]

    @staticmethod
    def check_agreement(messages: Sequence[StepMessage]) -> None:
        """Raise EngineStateError if ranks hold different weights, or have sampled different tokens."""
        for name, words in (("version", "hold policy versions"), ("fingerprint", "sampled different tokens:")):
            values = [getattr(message, name) for message in messages]
            if len(set(values)) > 1:
                raise EngineStateError(
                    f"the ranks that share this engine {words} {values}; their samples are invalid: make a new Trainer"
                )
