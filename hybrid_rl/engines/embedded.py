"""Base of the engines that generate from the trainer's own modules, so that a handoff copies nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hybrid_rl.engines.base import KV_CACHE, WEIGHTS, EngineState, FinishedSample, Generation
from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.errors import HandoffError
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.resharding.handoff.tensor import TensorSource, check_shared
from hybrid_rl.weights.sources import named_weights

_logger = logging.getLogger("hybrid_rl")

REPLACED = "modules or parameters of the model were replaced since the engine was made; make a new Trainer"

Some = TypeVar("Some", bound=Generation)


class EmbeddedEngine(RolloutEngine):
    """A RolloutEngine over a `CausalLM` of this process. max_num_waiting, decode: same as RolloutEngine.

    The weights are the actor's: another resident decides about their memory, and `sleep` and `wake` move the cache
    only.
    """

    def __init__(self, model: CausalLM, *, max_num_waiting: int, decode: Callable[[Sequence[int]], str] | None) -> None:
        super().__init__(
            vocab_size=model.vocab_size, limit=model.length_limit, max_num_waiting=max_num_waiting, decode=decode
        )
        self._model = model
        self._weights = named_weights(model.module)
        self._cache_is_awake = False

    def _extended(
        self, sequences: Sequence[Some], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> tuple[list[Some], list[FinishedSample]]:
        """Append a token to each of these; those that end with it, and their events. A sequence may be there several
        times in a row; what comes after its end is dropped."""
        ended: list[Some] = []
        finished = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if ended and ended[-1] is sequence:
                continue
            reason = self._extend(sequence, token, logprob)
            if reason is not None:
                ended.append(sequence)
                finished.append(self._finish(sequence, reason))
        return ended, finished

    def _tell_shortage(self, error: BaseException, how: str) -> None:
        """Say how a pass which ran out of memory is done again."""
        what = str(error).split("\n")[0]
        _logger.warning("memory ran out in a pass of the engine (%s): its sequences begin again, %s", what, how)

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Take a policy version. The source must be the very tensors that this engine decodes from."""
        start = time.perf_counter()
        self.require_update(version)
        if not isinstance(source, TensorSource):
            raise HandoffError(f"the engine shares the trainer's tensors; a {type(source).__name__} has none")
        current = named_weights(self._model.module)
        if any(current.get(name) is not tensor for name, tensor in self._weights.items()):
            raise HandoffError(REPLACED)
        num_tensors = check_shared(source, current)
        self._begin_rollout()
        self.policy_version = version
        return HandoffReport(0, version=version, num_tensors=num_tensors, seconds=time.perf_counter() - start)

    def _expect_moves(self) -> None:
        """Look where weights and cache are before the next pass; only needed by engines that remember addresses."""
        return

    def sleep(self, tags: Iterable[str]) -> None:
        """Release the memory of the cache; what it held is lost."""
        tags = self.require_sleep(tags)
        self._begin_rollout()
        self._release_cache()
        self._cache_is_awake = False
        self.state = EngineState.ASLEEP if WEIGHTS in tags or self.state is EngineState.ASLEEP else EngineState.WEIGHTS

    def _release_cache(self) -> None:
        """Give the memory of the cache back, if it has any of its own."""
        return

    def wake(self, tags: Iterable[str]) -> None:
        """Get the memory of the cache back."""
        tags = self.require_wake(tags)
        if KV_CACHE in tags:
            self._allocate_cache()
            self._cache_is_awake = True
        self._expect_moves()
        self.state = EngineState.READY if self._cache_is_awake else EngineState.WEIGHTS

    def _allocate_cache(self) -> None:
        """Get the memory of the cache; nothing to do if it grows with its sequences."""
        return
