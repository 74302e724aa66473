"""The contract of engines, and what all engines do alike: refusals of impossible requests and badly timed calls,
counters, and the end of a sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import psutil
import torch

from hybrid_rl.engines.base import (
    TAGS,
    WEIGHTS,
    Counters,
    EngineState,
    EngineStats,
    FinishedSample,
    FinishReason,
    Generation,
    RolloutRequest,
)
from hybrid_rl.engines.stop_strings import StopStrings
from hybrid_rl.errors import DataError, EngineStateError, QueueFullError
from hybrid_rl.models.packed.startup_check import LengthLimit
from hybrid_rl.resharding.handoff.base import HandoffReport, Source

FREE_MEMORY_SHARE = 0.4  # of what the machine has free, if the size of the cache is not set


class Generator(ABC):
    """The half of an engine that generates. Not thread-safe: one caller at a time (see EngineClient).

    `submit` queues requests, and each `step` advances all of them and returns those that finished. State and policy
    version guard every call: an engine generates only when READY, and only with the weights that its caller believes it
    has.

    vocab_size: token ids are below it. limit: of prompt and completion together, None = no limit. max_num_waiting:
    requests that may wait. decode: token ids to text; only requests with stop strings need it.

    state, policy_version: what is in memory, and which version the weights are (-1: none). kv_cache_tokens: what the
    cache holds; no sequence can be longer. experts_shape: (L, K) of `FinishedSample.routed_experts`; None = the engine
    does not record experts.
    """

    kv_cache_tokens: int
    experts_shape: tuple[int, int] | None = None

    def __init__(
        self,
        *,
        vocab_size: int,
        limit: LengthLimit | None,
        max_num_waiting: int,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self.state = EngineState.ASLEEP
        self.policy_version = -1
        self._vocab_size, self._limit, self._max_num_waiting = vocab_size, limit, max_num_waiting
        self._decode = decode
        self._ids: set[int] = set()  # of the requests that are not finished
        self._aborted: set[int] = set()
        self._stopping: dict[tuple[str, ...], StopStrings] = {}
        self.counters = Counters()

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests that have memory, or hold their place in it."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests that wait for memory."""

    @property
    def num_unfinished(self) -> int:
        """Requests that have not been returned by `step` yet."""
        return len(self._ids)

    @property
    def num_queueable(self) -> int:
        """Requests that may still be submitted. Preempted ones wait as well, beyond the limit if need be."""
        return max(0, self._max_num_waiting - self.num_waiting)

    # ------------------------------------------------------------------------------------------------ requests

    def check(self, requests: Sequence[RolloutRequest], version: int) -> None:
        """Raise EngineStateError unless READY at this version, DataError for a request that can never run."""
        self.require_ready(version)
        for request in requests:
            self._check(request)

    def submit(self, requests: Sequence[RolloutRequest], version: int) -> list[int]:
        """Queue requests, to be answered by weights of this version; returns their ids.

        Raises what `check` raises, DataError for an id that is in use, QueueFullError for more than `num_queueable`
        requests. Nothing is queued if one request is refused.
        """
        self.check(requests, version)
        if len(requests) > self.num_queueable:
            raise QueueFullError(
                f"{len(requests)} requests were submitted, but only {self.num_queueable} of "
                f"max_num_waiting={self._max_num_waiting} may still wait; submit fewer at a time, or raise it"
            )
        ids = [request.id for request in requests]
        known = set(self._ids)
        for identity in ids:
            if identity in known:
                raise DataError(f"request id {identity} is in use")
            known.add(identity)
        self._ids = known
        self._queue(requests)
        return ids

    @abstractmethod
    def _queue(self, requests: Sequence[RolloutRequest]) -> None:
        """Let checked requests wait."""

    def begin_rollout(self) -> None:
        """Forget what earlier requests left behind (cached prefixes, the state of a random generator): a rollout must
        not depend on what was generated before it. Does nothing while requests are unfinished."""
        if not self._ids:
            self._begin_rollout()

    def _begin_rollout(self) -> None:
        """Forget cached prefixes and the like; an engine that keeps none has nothing to do."""
        return

    def _check(self, request: RolloutRequest) -> None:
        params = request.params
        if not request.prompt_ids:
            raise DataError(f"request {request.id} has an empty prompt")
        begun = request.begun
        if len({len(begun.token_ids), len(begun.logprobs), len(begun.versions)}) > 1:
            raise DataError(f"request {request.id}: its first tokens, their logprobs and versions differ in number")
        if len(begun.token_ids) >= params.max_tokens:
            raise DataError(
                f"request {request.id} begins with {len(begun.token_ids)} tokens of at most {params.max_tokens}: there "
                "is nothing left to generate"
            )
        for tokens in (request.prompt_ids, params.stop_token_ids, begun.token_ids):
            if tokens and (min(tokens) < 0 or max(tokens) >= self._vocab_size):
                outside = next(token for token in tokens if not 0 <= token < self._vocab_size)
                raise DataError(
                    f"request {request.id}: token {outside} is outside the vocabulary of {self._vocab_size}"
                )
        length = len(request.prompt_ids) + params.max_tokens
        if self._limit is not None and length > self._limit.num_tokens:
            raise DataError(
                f"request {request.id}: {len(request.prompt_ids)} prompt tokens and a completion of up to "
                f"{params.max_tokens} exceed {self._limit.num_tokens} tokens ({self._limit.why}); shorten the "
                "prompt, or ask for a shorter completion"
            )
        if length > self.kv_cache_tokens:
            raise DataError(
                f"request {request.id}: {length} tokens do not fit the KV cache of {self.kv_cache_tokens}; raise "
                "kv_cache_memory_bytes or lower max_completion_length"
            )
        strings = params.stop_strings
        if strings and strings not in self._stopping:
            if self._decode is None:
                raise DataError(f"request {request.id} has stop strings, but the engine was given no decode function")
            self._stopping[strings] = StopStrings(self._decode, strings)

    def _extend(self, generation: Generation, token: int, logprob: float) -> FinishReason | None:
        """Append a token. Return why it ends the completion, if it does: a stop token, a stop string, or the length."""
        generation.tokens.append(token)
        generation.logprobs.append(logprob)
        generation.versions.append(self.policy_version)
        self.counters.num_generated_tokens += 1
        params = generation.request.params
        if token in params.stop_token_ids:
            return "stop"
        if params.stop_strings and self._stopping[params.stop_strings].is_completed(generation.tokens):
            return "stop"
        return "length" if len(generation.tokens) >= params.max_tokens else None

    def _finish(self, generation: Generation, reason: FinishReason) -> FinishedSample:
        """Return the event of a finished request."""
        self._ids.discard(generation.request.id)
        self.counters.num_finished += 1
        made = generation.tokens, generation.logprobs, generation.versions
        return FinishedSample(generation.request.id, *made, reason, self._routed_experts(generation))

    def _routed_experts(self, generation: Generation) -> npt.NDArray[np.int16] | None:
        """Return `FinishedSample.routed_experts`."""
        return None

    @abstractmethod
    def step(self) -> list[FinishedSample]:
        """Advance every running request by one token (or prefill some); returns what finished. No requests: no
        events."""

    def abort(self, ids: Iterable[int]) -> None:
        """End these requests; they finish with reason "abort" at the next step. Unknown ids are ignored."""
        self._aborted |= self._ids & set(ids)

    def abort_all(self) -> None:
        """End every request at once and leave the engine empty; the events are lost."""
        self.abort(self._ids)
        self.step()

    def stats(self) -> EngineStats:
        """Counters and state."""
        num_bytes, used_share = self._cache_usage()
        return EngineStats(
            state=self.state,
            policy_version=self.policy_version,
            num_waiting=self.num_waiting,
            num_queueable=self.num_queueable,
            num_running=self.num_running,
            kv_cache_bytes=num_bytes,
            kv_cache_used_share=used_share,
            **vars(self.counters),
        )

    @abstractmethod
    def _cache_usage(self) -> tuple[int, float]:
        """Return the bytes of the cache in memory now, and the share of it that is in use."""

    def require_ready(self, version: int) -> None:
        """Raise EngineStateError unless the engine may generate with weights of this version."""
        if self.state is not EngineState.READY:
            raise EngineStateError(
                f"the engine is {self.state.value}, not ready; wake {sorted(TAGS)} before generating"
            )
        if self.policy_version < 0:
            raise EngineStateError(
                "the engine holds no valid weights: it was never given any, lost them when it slept, or they failed a "
                "check; update its weights before generating"
            )
        if version != self.policy_version:
            raise EngineStateError(
                f"the engine holds policy version {self.policy_version} but version {version} was expected; update its "
                f"weights first"
            )


class RolloutEngine(Generator):
    """A generator of completions that holds the weights of a policy version. Weights and cache come and go by tag. The
    arguments are those of Generator. kv_cache_bytes: of the cache while it is awake."""

    kv_cache_bytes: int

    @abstractmethod
    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Take the weights of a policy version. Cached prefixes are dropped.

        Raises EngineStateError while requests are unfinished, which were promised the version they were submitted for,
        or for a version that does not rise; HandoffError if the weights cannot be taken or are wrong: an engine that
        has written some of them by then holds no version, and generates nothing until it is given weights.
        """

    @abstractmethod
    def sleep(self, tags: Iterable[str]) -> None:
        """Release the memory of these tags ("weights", "kv_cache"). An engine may discard its weights: then it holds no
        version, and generates nothing until it is given weights."""

    @abstractmethod
    def wake(self, tags: Iterable[str]) -> None:
        """Get the memory of these tags back. Weights come before the cache."""

    def invalidate(self) -> None:
        """Generate nothing more with the current weights: they turned out to be wrong."""
        self.policy_version = -1

    def close(self) -> None:
        """Release everything. The engine cannot be used afterwards."""
        return

    def require_update(self, version: int) -> None:
        """Raise EngineStateError unless weights of this version may be written now."""
        if self.state is EngineState.ASLEEP:
            raise EngineStateError("the engine is asleep; wake its weights before updating them")
        if version <= self.policy_version:
            raise EngineStateError(
                f"policy version {version} does not follow version {self.policy_version}, which the engine holds"
            )
        if self._ids:
            raise EngineStateError(
                f"{self.num_running} requests are running and {self.num_waiting} waiting; finish them, or end them by "
                f"abort_all()"
            )

    def require_sleep(self, tags: Iterable[str]) -> frozenset[str]:
        """Return the tags. Raises ValueError for unknown ones, EngineStateError while requests run."""
        known = known_tags(tags)
        if self.num_running:
            raise EngineStateError(f"{self.num_running} requests are running; finish or end them before sleeping")
        return known

    def require_wake(self, tags: Iterable[str]) -> frozenset[str]:
        """Return the tags. Raises ValueError for unknown ones, EngineStateError if the cache would wake first."""
        known = known_tags(tags)
        if self.state is EngineState.ASLEEP and WEIGHTS not in known:
            raise EngineStateError("the engine's weights are asleep; wake them before, or together with, its cache")
        return known


def free_cache_bytes(device: torch.device, memory_share: float) -> int:
    """Return the bytes that a cache may take if its size is not set: FREE_MEMORY_SHARE of what the device, or on a CPU
    the host, has free now. memory_share: of the free memory that is this engine's to use."""
    is_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else psutil.virtual_memory().available
    return int(FREE_MEMORY_SHARE * memory_share * free)


def known_tags(tags: Iterable[str]) -> frozenset[str]:
    """Return the tags as a set. Raises ValueError for none, or for unknown ones."""
    tags = frozenset(tags)
    if not tags or tags - TAGS:
        raise ValueError(f"tags {sorted(tags)} must be some of {sorted(TAGS)}")
    return tags
