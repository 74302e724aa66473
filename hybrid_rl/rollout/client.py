"""The driver's side of an engine: wherever the engine lives, this is what the driver talks to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hybrid_rl.controller import WorkerGroup
from hybrid_rl.errors import EngineStateError
from hybrid_rl.rollout.base import EngineStats, FinishedSample, RolloutRequest


class RolloutClient(Protocol):
    """What a collector needs of an engine."""

    def stream(self, requests: Sequence[RolloutRequest], version: int) -> Iterator[list[FinishedSample]]:
        """Run requests to their end, handing out what finished after every engine step. More requests than the engine
        lets wait are fed to it as it gets room.

        Where the consumer stops early, by an error or Ctrl-C, what still runs is aborted: the engine is left empty.
        """
        ...

    def stats(self) -> EngineStats:
        """Counters of the engine."""
        ...


class GroupRolloutClient:
    """A client for engines that live in the workers of a group."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._busy = False

    def stream(self, requests: Sequence[RolloutRequest], version: int) -> Iterator[list[FinishedSample]]:
        """See RolloutClient."""
        if self._busy:
            raise EngineStateError(
                "the engine is busy with another rollout; do not generate from a reward function or another thread "
                "meanwhile"
            )
        self._busy = True
        open_requests = num_sent = 0
        try:
            while open_requests or num_sent < len(requests):
                if num_sent < len(requests):
                    wave = requests[num_sent : num_sent + self.stats().num_queueable]
                    self._submit(wave, version)
                    open_requests += len(wave)
                    num_sent += len(wave)
                finished = self._workers.step()
                open_requests -= len(finished)
                if finished:
                    yield finished
        finally:
            self._busy = False
            if open_requests:
                self._workers.abort_all()

    def _submit(self, requests: Sequence[RolloutRequest], version: int) -> None:
        try:
            self._workers.submit(requests, version)
        except KeyboardInterrupt:
            self._workers.abort_all()  # the interrupt was held back until they were queued
            raise

    def stats(self) -> EngineStats:
        """See RolloutClient."""
        return self._workers.engine_stats()
