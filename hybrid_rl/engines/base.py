"""The contract of engines: what generates completions, and what holds weights.

`submit` queues requests, and each `step` advances all of them and returns those that finished. Weights and cache come
and go by tag, and every call is guarded by state and policy version: an engine generates only when READY, and only with
the weights that its caller believes it has.
"""

from __future__ import annotations

import enum
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_rl.errors import ConfigError
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.resharding.layout import WeightLayout

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = frozenset({WEIGHTS, KV_CACHE})

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


class EngineState(enum.Enum):
    """Contents of an engine's memory: nothing, the weights, or the weights and the cache."""

    ASLEEP = "asleep"
    WEIGHTS = "weights"
    READY = "ready"


@dataclass(frozen=True)
class SamplingParams:
    """Choice of the tokens of one request.

    max_tokens: longest completion, stop token counted. temperature: 0 = greedy. top_k = 0, top_p = 1, min_p = 0: off.
    repetition_penalty: divides the positive and multiplies the other logits of tokens that prompt or completion hold;
    1 = off. stop_token_ids: any of them ends the completion and is its last token. stop_strings: the token with which
    the completion's text contains one of them is its last token. seed: with the position it decides each token's
    noise, whatever else is in the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature == 0 or 1e-4 <= self.temperature <= 1e4, "0 (greedy), or 1e-4 to 1e4"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and above 0; 1 is off"),
            ("stop_strings", _are_texts(self.stop_strings), "texts, none of them empty"),
            ("seed", -(2**63) <= self.seed < 2**63, "a signed 64-bit integer"),
        )
        for name, holds, words in checks:
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {words}")


def _are_texts(strings: Any) -> bool:
    return not isinstance(strings, str) and all(isinstance(string, str) and string for string in strings)


@dataclass(frozen=True)
class RolloutRequest:
    """A completion to be made. Requests of the same `group` have the same prompt and share its keys and values."""

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    group: int | None = None


@dataclass(frozen=True)
class FinishedSample:
    """The event of a finished request.

    completion_ids, logprobs and versions have one entry per generated token: its id, ln p under the distribution that
    it was sampled from, and the version of the weights that made it.
    """

    id: int
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


@dataclass(eq=False)
class Generation:
    """A request and what has been generated for it so far: token ids, ln p and policy version of each."""

    request: RolloutRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made and its state now.

    num_waiting, num_queueable, num_running: requests that wait, that may still be submitted, and that run, now.
    num_prompt_tokens: computed tokens that were not decoded, those computed again included. num_shared_prompt_tokens,
    num_prefix_tokens: tokens that were not computed because a request of the same group computed them, or because the
    cache held them. num_preemptions: how often a running request gave its memory back to be computed again later.
    """

    state: EngineState
    policy_version: int
    num_waiting: int
    num_queueable: int
    num_running: int
    num_finished: int
    num_prompt_tokens: int
    num_shared_prompt_tokens: int
    num_prefix_tokens: int
    num_preemptions: int
    num_generated_tokens: int
    num_steps: int
    kv_cache_bytes: int
    kv_cache_used_share: float


class Generator(ABC):
    """The half of an engine that generates. Not thread-safe: one caller at a time (see EngineClient)."""

    @abstractmethod
    def check(self, requests: Sequence[RolloutRequest], version: int) -> None:
        """Raise EngineStateError unless READY at this version, DataError for a request that can never run."""

    @abstractmethod
    def begin_rollout(self) -> None:
        """Forget what earlier requests left behind (cached prefixes, the state of a random generator): a rollout must
        not depend on what was generated before it. Does nothing while requests are unfinished."""

    @abstractmethod
    def submit(self, requests: Sequence[RolloutRequest], version: int) -> list[int]:
        """Queue requests, to be answered by weights of this version; returns their ids.

        Raises what `check` raises, DataError for an id that is in use, QueueFullError for more than `num_queueable`
        requests. Nothing is queued if one request is refused.
        """

    @abstractmethod
    def step(self) -> list[FinishedSample]:
        """Advance every running request by one token (or prefill some); returns what finished. No requests: no
        events."""

    @abstractmethod
    def abort(self, ids: Iterable[int]) -> None:
        """End these requests; they finish with reason "abort" at the next step. Unknown ids are ignored."""

    @abstractmethod
    def abort_all(self) -> None:
        """End every request at once and leave the engine empty; the events are lost."""

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Stop generating. abort: end all requests; wait: finish them, admit no new ones; keep: hold them as they
        are."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after `pause`."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Counters and state."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests that have not been returned by `step` yet."""

    @property
    @abstractmethod
    def num_queueable(self) -> int:
        """Requests that may still be submitted."""

    @property
    @abstractmethod
    def kv_cache_tokens(self) -> int:
        """Tokens that the cache holds: no sequence can be longer."""


class WeightHolder(ABC):
    """The half of an engine that holds weights and memory.

    state, policy_version: what is in memory, and which version the weights are (-1: none).
    """

    state: EngineState
    policy_version: int

    @abstractmethod
    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Take the weights of a policy version. Cached prefixes are dropped; kept requests are prefilled again.

        Raises EngineStateError while requests run that are not held by pause("keep"), while requests wait that no pause
        holds back (they were promised the version they were submitted for), or for a version that does not rise;
        HandoffError if the weights cannot be taken or are wrong: an engine that has written some of them by then holds
        no version, and generates nothing until it is given weights.
        """

    @abstractmethod
    def weight_layout(self) -> WeightLayout:
        """Names, shapes and dtypes of the weights that the engine holds."""

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

    @property
    @abstractmethod
    def kv_cache_bytes(self) -> int:
        """Bytes of the cache while it is awake."""

    def close(self) -> None:
        """Release everything. The engine cannot be used afterwards."""
        return


class RolloutEngine(Generator, WeightHolder):
    """A generator of completions that holds the weights of a policy version."""


def generate(engine: Generator, requests: Sequence[RolloutRequest], version: int) -> list[FinishedSample]:
    """Run requests to their end, as a rollout of their own; results in the order of the requests."""
    engine.begin_rollout()
    engine.submit(requests, version)
    finished: dict[int, FinishedSample] = {}
    while engine.num_unfinished:
        finished.update((sample.id, sample) for sample in engine.step())
    return [finished[request.id] for request in requests]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts and on nothing else (BLAKE2b)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
