"""What makes requests of an engine: wherever it lives, this is what a rollout talks to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hybrid_rl.engines.base import EngineStats, FinishedSample, RolloutEngine, RolloutRequest
from hybrid_rl.errors import EngineStateError
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.process.interrupts import interrupt_requested


class RolloutClient(Protocol):
    """What a rollout needs of an engine."""

    def stream(self, requests: Sequence[RolloutRequest], version: int) -> Iterator[list[FinishedSample]]:
        """Run requests to their end, handing out what finished after every engine step. More requests than the engine
        lets wait are fed to it as it gets room.

        Where the consumer stops early, by an error or an interrupt, what still runs is aborted: the engine is left
        empty. Raises KeyboardInterrupt, between two engine steps, where an interrupt was requested.
        """
        ...

    def stats(self) -> EngineStats:
        """Counters of the engine."""
        ...


class EngineClient:
    """A client of an engine in this process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._busy = False

    def stream(self, requests: Sequence[RolloutRequest], version: int) -> Iterator[list[FinishedSample]]:
        """See RolloutClient."""
        if self._busy:
            raise EngineStateError(
                "the engine is busy with another rollout; do not generate from a reward function or another thread "
                "meanwhile"
            )
        self._busy = True
        num_sent = num_finished = 0
        is_shared = self._engine.num_ranks > 1
        try:
            self._engine.announce(len(requests))
            while num_finished < len(requests) or (is_shared and self._engine.num_unfinished):
                if interrupt_requested():
                    raise KeyboardInterrupt
                mark_progress()
                if num_sent < len(requests):
                    wave = requests[num_sent : num_sent + self.stats().num_queueable]
                    self._engine.submit(wave, version)
                    num_sent += len(wave)
                finished = self._engine.step()
                num_finished += len(finished)
                if finished:
                    yield finished
        finally:
            self._busy = False
            # Of an engine for itself a rank ends only what it sent; from a shared one it may not leave quietly.
            if self._engine.num_unfinished if is_shared else num_finished < num_sent:
                self._engine.break_off()

    def stats(self) -> EngineStats:
        """See RolloutClient."""
        return self._engine.stats()
