"""vLLM's memory, by tag."""

from __future__ import annotations

import logging
from typing import Any

from hybrid_rl.rollout.base import KV_CACHE, WEIGHTS
from hybrid_rl.rollout.vllm.versions import has

logger = logging.getLogger(__name__)


class EngineMemory:
    """Puts an LLMEngine's weights and cache to sleep, and wakes them. Requests that it holds stay, and are computed
    again. can_sleep: whether its platform can give memory back; where it cannot, nothing is moved and the log says so
    once."""

    def __init__(self, llm: Any, *, can_sleep: bool) -> None:
        self._llm, self._can_sleep = llm, can_sleep
        self.asleep: set[str] = set()
        self._has_told = False

    def sleep(self, tags: frozenset[str]) -> None:
        """Give the memory of these tags back. The cache sleeps whenever the weights do: nothing can be cached then.

        Weights are kept in host memory meanwhile.
        """
        wanted = (tags | {KV_CACHE}) - self.asleep
        if not wanted:
            return
        if self._can_sleep:
            self._sleep(wanted)
        elif not self._has_told:
            logger.warning(
                "vLLM cannot sleep on CPUs: its weights and its KV cache stay in memory while the trainer works"
            )
            self._has_told = True
        self.asleep |= wanted

    def _sleep(self, wanted: frozenset[str]) -> None:
        if wanted == {KV_CACHE} and has("cache_sleeps_alone", self._llm):
            self._llm.engine_core.engine_core.pause_scheduler(mode="keep")
            self._llm.release_kv_cache_memory()
            return
        if KV_CACHE in self.asleep and not has("weights_sleep_after_cache", self._llm):
            self._llm.wake_up([KV_CACHE])
        self._llm.sleep(level=1, mode="keep")
        if WEIGHTS not in wanted:
            self._llm.wake_up([WEIGHTS])

    def wake(self, tags: frozenset[str]) -> None:
        """Get the memory of these tags back."""
        wanted = tags & self.asleep
        if self._can_sleep and wanted:
            self._llm.wake_up([tag for tag in (WEIGHTS, KV_CACHE) if tag in wanted])
        self.asleep -= wanted
