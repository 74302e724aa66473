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
        """Run requests to their end, handing out what finished after every engine step.

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
        open_requests = 0
        try:
            self._submit(requests, version)
            open_requests = len(requests)
            while open_requests:
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
