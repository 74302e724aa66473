"""The contract between whoever wants completions and whatever makes them.

An engine works on requests: `submit` queues them, each `step` moves all of them on and returns those that finished.
Weights and cache come and go by tag, and every call is guarded by state and policy version: an engine generates only
when READY, and only with the weights that its caller believes it has.
"""

from __future__ import annotations

import enum
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_rl.errors import ConfigError, EngineStateError
from hybrid_rl.resharding.handoff.base import HandoffReport, Source
from hybrid_rl.resharding.layout import WeightLayout

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = frozenset({WEIGHTS, KV_CACHE})

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


class EngineState(enum.Enum):
    """What lies in memory: nothing, the weights, or the weights and the cache."""

    ASLEEP = "asleep"
    WEIGHTS = "weights"
    READY = "ready"


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

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
    """One completion asked for. Requests of the same `group` have the same prompt and share its keys and values."""

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


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made and its state now.

    num_waiting, num_queueable, num_running: requests that wait, that may still be submitted, and that run, now.
    num_prompt_tokens: computed tokens that were not decoded, those computed again included. num_shared_prompt_tokens,
    num_prefix_tokens: tokens that were not computed because a request of the same group was at it, or because the cache
    held them. num_preemptions: how often a running request gave its memory back to be computed again later.
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


class RolloutEngine(ABC):
    """A generator of completions. Not thread-safe: one caller at a time.

    state, policy_version: what lies in memory, and of which version the weights are (-1: of none). num_ranks: ranks
    that share the engine; each submits requests of its own and gets their events, and all call `step` together.
    """

    num_ranks: int = 1

    def __init__(self) -> None:
        self.state = EngineState.ASLEEP
        self.policy_version = -1

    @abstractmethod
    def check(self, requests: Sequence[RolloutRequest], version: int) -> None:
        """Raise what `submit` would raise for these requests; queue nothing."""

    @abstractmethod
    def submit(self, requests: Sequence[RolloutRequest], version: int) -> list[int]:
        """Queue requests, to be answered by weights of this version; returns their ids.

        Raises EngineStateError unless READY at that version, ValueError for a request that can never run. Nothing is
        queued if one request is refused.
        """

    @abstractmethod
    def step(self) -> list[FinishedSample]:
        """Move every running request on by one token (or prefill some); returns what finished. No requests: no
        events."""

    @abstractmethod
    def abort(self, ids: Iterable[int]) -> None:
        """End these requests; they finish with reason "abort" at the next step. Unknown ids are ignored."""

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Stop generating. abort: end all requests; wait: finish them, admit no new ones; keep: hold them as they
        are."""

    @abstractmethod
    def resume(self) -> None:
        """Go on after `pause`."""

    @abstractmethod
    def update_weights(self, source: Source, version: int) -> HandoffReport:
        """Take the weights of a policy version. Cached prefixes are dropped; kept requests are prefilled again.

        Raises EngineStateError while requests run that are not held by pause("keep"), while requests wait that no pause
        holds back (they were promised the version they were submitted for), or for a version that does not rise;
        HandoffError where the weights cannot be taken or are wrong: an engine that has written some of them by then
        holds no version, and generates nothing until it is given weights.
        """

    @abstractmethod
    def sleep(self, tags: Iterable[str]) -> None:
        """Let go of the memory behind these tags ("weights", "kv_cache"). An engine may discard its weights: then it
        holds no version, and generates nothing until it is given weights."""

    @abstractmethod
    def wake(self, tags: Iterable[str]) -> None:
        """Get the memory behind these tags back. Weights come before the cache."""

    @abstractmethod
    def weight_layout(self) -> WeightLayout:
        """Names, shapes and dtypes of the weights that the engine holds."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Counters and state."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests that have not been returned by `step` yet, those of all ranks that share the engine."""

    @property
    @abstractmethod
    def kv_cache_tokens(self) -> int:
        """Tokens that the cache holds: no sequence can be longer."""

    @property
    @abstractmethod
    def kv_cache_bytes(self) -> int:
        """Bytes of the cache while it is awake."""

    def announce(self, num_requests: int) -> None:
        """Say how many requests are about to be submitted, none perhaps. Where ranks share an engine, all of them
        announce, and then step until nothing is unfinished: none may leave while another still needs it."""
        return

    def break_off(self) -> None:
        """End every request at once and leave the engine empty; the events are lost. Where ranks share an engine this
        ends the requests of all of them: their `step` raises EngineStateError."""
        self.pause("abort")
        try:
            self.step()
        finally:
            self.resume()

    def distrust(self) -> None:
        """Generate nothing more with the weights that are there: they turned out not to be what they should be."""
        self.policy_version = -1

    def close(self) -> None:
        """Let go of everything. The engine cannot be used afterwards."""
        return

    def require_ready(self, version: int) -> None:
        """Raise EngineStateError unless the engine may generate with weights of this version."""
        if self.state is not EngineState.READY:
            raise EngineStateError(
                f"the engine is {self.state.value}, not ready; wake {sorted(TAGS)} before generating"
            )
        if self.policy_version < 0:
            raise EngineStateError(
                "the engine holds no weights to trust: it has never been given weights, or not since it slept, or they "
                "were found wrong; publish them before generating"
            )
        if version != self.policy_version:
            raise EngineStateError(
                f"the engine holds policy version {self.policy_version} but version {version} was expected; publish "
                f"the weights first"
            )


def generate(engine: RolloutEngine, requests: Sequence[RolloutRequest], version: int) -> list[FinishedSample]:
    """Run requests to their end; results in the order of the requests."""
    engine.announce(len(requests))
    engine.submit(requests, version)
    finished: dict[int, FinishedSample] = {}
    while engine.num_unfinished:
        finished.update((sample.id, sample) for sample in engine.step())
    return [finished[request.id] for request in requests]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts and on nothing else (BLAKE2b)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
