"""What the engines have in common that generate from the trainer's own modules, so that a handoff writes no byte."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from hybrid_rl.engines.base import EngineStats, FinishedSample, FinishReason, RolloutRequest
from hybrid_rl.engines.guards import GuardedEngine
from hybrid_rl.errors import HandoffError
from hybrid_rl.models import CausalLM
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.resharding.handoff.tensor import TensorSource, check_shared
from hybrid_rl.resharding.layout import WeightLayout, named_weights


class Unfinished(Protocol):
    """A sample in the making, as each engine keeps it."""

    request: RolloutRequest

    def finished(self, reason: FinishReason) -> FinishedSample:
        """What it is if it ends here."""


class EmbeddedEngine(GuardedEngine):
    """A RolloutEngine over a `CausalLM` of this process. max_num_waiting, decode: as of GuardedEngine."""

    def __init__(self, model: CausalLM, *, max_num_waiting: int, decode: Callable[[Sequence[int]], str] | None) -> None:
        limit = model.length_limit
        super().__init__(
            vocab_size=model.vocab_size,
            max_length=None if limit is None else limit.num_tokens,
            why="" if limit is None else limit.why,
            max_num_waiting=max_num_waiting,
            decode=decode,
        )
        self._model = model
        self._weights = named_weights(model.module)
        self._num_finished = self._num_prompt_tokens = self._num_shared_tokens = 0
        self._num_generated_tokens = self._num_steps = 0

    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """See RolloutEngine. The source must be the very tensors that this engine decodes from."""
        start = time.perf_counter()
        self.require_update(version)
        if not isinstance(source, TensorSource):
            raise HandoffError(f"the engine shares the trainer's tensors; a {type(source).__name__} has none")
        current = named_weights(self._model.module)
        if any(current.get(name) is not tensor for name, tensor in self._weights.items()):
            raise HandoffError(
                "modules or parameters of the model were replaced since the engine was made; make a new Trainer"
            )
        num_tensors = check_shared(source, current)
        self._forget()
        self.policy_version = version
        return HandoffReport(version, 0, num_tensors, time.perf_counter() - start)

    @abstractmethod
    def _forget(self) -> None:
        """What was computed with the weights so far is no longer true, and they may lie elsewhere."""

    def weight_layout(self) -> WeightLayout:
        """See RolloutEngine."""
        return WeightLayout.of(self._weights.items())

    def _finish_reason(self, request: RolloutRequest, tokens: Sequence[int]) -> FinishReason | None:
        if self._is_stopped(request, tokens):
            return "stop"
        return "length" if len(tokens) >= request.params.max_tokens else None

    def _finish(self, sequence: Unfinished, reason: FinishReason) -> FinishedSample:
        self._ids.discard(sequence.request.id)
        self._num_finished += 1
        return sequence.finished(reason)

    def _stats(
        self, kv_cache_bytes: int, kv_cache_used_share: float, *, num_prefix_tokens: int = 0, num_preemptions: int = 0
    ) -> EngineStats:
        """What both count, and what each knows of its cache."""
        return EngineStats(
            state=self.state,
            policy_version=self.policy_version,
            num_waiting=self.num_waiting,
            num_queueable=self.num_queueable,
            num_running=self.num_running,
            num_finished=self._num_finished,
            num_prompt_tokens=self._num_prompt_tokens,
            num_shared_prompt_tokens=self._num_shared_tokens,
            num_prefix_tokens=num_prefix_tokens,
            num_preemptions=num_preemptions,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_used_share=kv_cache_used_share,
        )
