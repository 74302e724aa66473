"""An engine around an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybrid_rl.engines.base import (
    EngineState,
    EngineStats,
    FinishedSample,
    PauseMode,
    RolloutEngine,
    RolloutRequest,
)
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.resharding.layout import WeightLayout


class EngineWrapper(RolloutEngine):
    """Passes every call on to another engine; what differs is overridden."""

    def __init__(self, inner: RolloutEngine) -> None:
        self._inner = inner
        self.num_ranks = inner.num_ranks

    @property
    def state(self) -> EngineState:  # type: ignore[override]
        """See RolloutEngine."""
        return self._inner.state

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        """See RolloutEngine."""
        return self._inner.policy_version

    def check(self, requests: Sequence[RolloutRequest], version: int) -> None:
        """See RolloutEngine."""
        self._inner.check(requests, version)

    def submit(self, requests: Sequence[RolloutRequest], version: int) -> list[int]:
        """See RolloutEngine."""
        return self._inner.submit(requests, version)

    def step(self) -> list[FinishedSample]:
        """See RolloutEngine."""
        return self._inner.step()

    def abort(self, ids: Iterable[int]) -> None:
        """See RolloutEngine."""
        self._inner.abort(ids)

    def pause(self, mode: PauseMode) -> None:
        """See RolloutEngine."""
        self._inner.pause(mode)

    def resume(self) -> None:
        """See RolloutEngine."""
        self._inner.resume()

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """See RolloutEngine."""
        return self._inner.update_weights(source, version)

    def sleep(self, tags: Iterable[str]) -> None:
        """See RolloutEngine."""
        self._inner.sleep(tags)

    def wake(self, tags: Iterable[str]) -> None:
        """See RolloutEngine."""
        self._inner.wake(tags)

    def weight_layout(self) -> WeightLayout:
        """See RolloutEngine."""
        return self._inner.weight_layout()

    def stats(self) -> EngineStats:
        """See RolloutEngine."""
        return self._inner.stats()

    @property
    def num_unfinished(self) -> int:
        """See RolloutEngine."""
        return self._inner.num_unfinished

    @property
    def kv_cache_tokens(self) -> int:
        """See RolloutEngine."""
        return self._inner.kv_cache_tokens

    @property
    def kv_cache_bytes(self) -> int:
        """See RolloutEngine."""
        return self._inner.kv_cache_bytes

    def announce(self, num_requests: int) -> None:
        """See RolloutEngine."""
        self._inner.announce(num_requests)

    def break_off(self) -> None:
        """See RolloutEngine."""
        self._inner.break_off()

    def distrust(self) -> None:
        """See RolloutEngine."""
        self._inner.distrust()

    def close(self) -> None:
        """See RolloutEngine."""
        self._inner.close()
