"""What every engine refuses, in one place: requests that cannot run, and calls at the wrong moment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from hybrid_rl.engines.base import TAGS, WEIGHTS, EngineState, PauseMode, RolloutEngine, RolloutRequest
from hybrid_rl.engines.stopping import StopStrings
from hybrid_rl.errors import DataError, EngineStateError, QueueFullError


class GuardedEngine(RolloutEngine):
    """The half of a RolloutEngine that is alike in all: who may submit, pause, update, sleep and wake, and when.

    vocab_size: token ids lie below it. max_length: longest prompt and completion together, None = no limit, for the
    reason that `why` tells.
    max_num_waiting: requests that may wait. decode: token ids to text; only requests with stop strings need it.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int | None,
        why: str,
        max_num_waiting: int,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        super().__init__()
        self._vocab_size, self._max_length, self._max_num_waiting = vocab_size, max_length, max_num_waiting
        self._why = why
        self._decode = decode
        self._ids: set[int] = set()  # of the requests that are not finished
        self._aborted: set[int] = set()
        self._stopping: dict[tuple[str, ...], StopStrings] = {}
        self._paused: PauseMode | None = None

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
        """See RolloutEngine."""
        return len(self._ids)

    @property
    def num_queueable(self) -> int:
        """Requests that may still be submitted. Those that were pushed out wait as well, beyond the limit if need
        be."""
        return max(0, self._max_num_waiting - self.num_waiting)

    # ------------------------------------------------------------------------------------------------ requests

    def check(self, requests: Sequence[RolloutRequest], version: int) -> None:
        """See RolloutEngine."""
        self.require_ready(version)
        if len(requests) > self.num_queueable:
            raise QueueFullError(
                f"{len(requests)} requests were submitted, but only {self.num_queueable} of "
                f"max_num_waiting={self._max_num_waiting} may still wait; submit fewer at a time, or raise it"
            )
        seen = set(self._ids)
        for request in requests:
            self._check(request, seen)
            seen.add(request.id)

    def _check(self, request: RolloutRequest, seen: set[int]) -> None:
        params = request.params
        if request.id in seen:
            raise DataError(f"request id {request.id} is in use")
        if not request.prompt_ids:
            raise DataError(f"request {request.id} has an empty prompt")
        outside = [t for t in (*request.prompt_ids, *params.stop_token_ids) if not 0 <= t < self._vocab_size]
        if outside:
            raise DataError(f"request {request.id}: token {outside[0]} is outside the vocabulary of {self._vocab_size}")
        length = len(request.prompt_ids) + params.max_tokens
        if self._max_length is not None and length > self._max_length:
            raise DataError(
                f"request {request.id}: {len(request.prompt_ids)} prompt tokens and a completion of up to "
                f"{params.max_tokens} exceed {self._max_length} tokens ({self._why}); shorten the prompt, or ask for "
                f"a shorter completion"
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

    def _is_stopped(self, request: RolloutRequest, token_ids: Sequence[int]) -> bool:
        """Whether the last of a completion's tokens is a stop token or completes a stop string."""
        params = request.params
        if token_ids[-1] in params.stop_token_ids:
            return True
        return bool(params.stop_strings) and self._stopping[params.stop_strings].is_completed(token_ids)

    def abort(self, ids: Iterable[int]) -> None:
        """See RolloutEngine."""
        self._aborted |= self._ids & set(ids)

    def pause(self, mode: PauseMode) -> None:
        """See RolloutEngine."""
        if known_pause(mode) == "abort":
            self.abort(self._ids)
        self._paused = mode

    def resume(self) -> None:
        """See RolloutEngine."""
        self._paused = None

    # --------------------------------------------------------------------------------------- weights and memory

    def require_update(self, version: int) -> None:
        """Raise EngineStateError unless weights of this version may be written now."""
        if self.state is EngineState.ASLEEP:
            raise EngineStateError("the engine is asleep; wake its weights before updating them")
        if version <= self.policy_version:
            raise EngineStateError(
                f"policy version {version} does not follow version {self.policy_version}, which the engine holds"
            )
        if (self._ids and self._paused is None) or (self.num_running and self._paused != "keep"):
            raise EngineStateError(
                f"{self.num_running} requests are running and {self.num_waiting} waiting; finish them, or hold them by "
                f"pause('keep'), or end them by pause('abort') and a step"
            )

    def require_sleep(self, tags: Iterable[str]) -> frozenset[str]:
        """The tags. Raises ValueError for unknown ones, EngineStateError while requests run that nobody holds."""
        known = known_tags(tags)
        if self.num_running and self._paused != "keep":
            raise EngineStateError(f"{self.num_running} requests are running; finish or pause them before sleeping")
        return known

    def require_wake(self, tags: Iterable[str]) -> frozenset[str]:
        """The tags. Raises ValueError for unknown ones, EngineStateError where the cache would wake before weights."""
        known = known_tags(tags)
        if self.state is EngineState.ASLEEP and WEIGHTS not in known:
            raise EngineStateError("the engine's weights are asleep; wake them before, or together with, its cache")
        return known


def known_pause(mode: PauseMode) -> PauseMode:
    """The mode. Raises ValueError for an unknown one."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode {mode!r} is unknown; use {', '.join(get_args(PauseMode))}")
    return mode


def known_tags(tags: Iterable[str]) -> frozenset[str]:
    """The tags as a set. Raises ValueError for none, or for unknown ones."""
    tags = frozenset(tags)
    if not tags or tags - TAGS:
        raise ValueError(f"tags {sorted(tags)} must be some of {sorted(TAGS)}")
    return tags
