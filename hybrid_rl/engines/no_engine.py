"""The place of an engine in a rank that only trains."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from hybrid_rl.engines.base import FinishedSample, RolloutRequest
from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.errors import EngineStateError
from hybrid_rl.resharding.handoff.base import HandoffReport, Source


class NoEngine(RolloutEngine):
    """Takes no memory, holds no weights and generates nothing."""

    kv_cache_bytes, kv_cache_tokens = 0, sys.maxsize
    num_running = num_waiting = 0

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size, limit=None, max_num_waiting=0, decode=None)

    def require_ready(self, version: int) -> None:
        """Raise EngineStateError: it never is."""
        raise EngineStateError("this rank only trains; the ranks of rollout_ranks generate")

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Raise EngineStateError: it takes none."""
        raise EngineStateError("this rank only trains; weights are handed to the ranks of rollout_ranks")

    def step(self) -> list[FinishedSample]:
        """Return nothing."""
        return []

    def sleep(self, tags: Iterable[str]) -> None:
        """Do nothing: it has no memory."""

    def wake(self, tags: Iterable[str]) -> None:
        """Do nothing: it has no memory."""

    def _queue(self, requests: Sequence[RolloutRequest]) -> None:
        """Do nothing: all requests have been refused."""

    def _cache_usage(self) -> tuple[int, float]:
        return 0, 0.0
