"""Requests, answers, and what engines count."""

from __future__ import annotations

import enum
import hashlib
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from hybrid_rl.engines.step_cost import StepCost
from hybrid_rl.errors import ConfigError

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = frozenset({WEIGHTS, KV_CACHE})

FinishReason = Literal["stop", "length", "abort"]


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
class Beginning:
    """The tokens that a completion has already, made by an earlier request: ids, ln p and policy version of each."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class RolloutRequest:
    """A completion to be made. Requests of the same `group` have the same prompt and share its keys and values.

    priority: of those that wait, lower ones start first; equal ones start in the order in which they came. The turns of
    a conversation have the number of their conversation, so that older conversations end before newer ones go on, and
    none waits for more than those before it.

    begun: what the completion begins with; the engine goes on after it, with the noise of that position, and max_tokens
    counts it.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    group: int | None = None
    priority: int = 0
    begun: Beginning = Beginning()


@dataclass(frozen=True)
class FinishedSample:
    """The event of a finished request.

    completion_ids, logprobs and versions have one entry per generated token: its id, ln p under the distribution that
    it was sampled from, and the version of the weights that made it. routed_experts: int16 [tokens, L, K], to which K
    experts each token of prompt and completion went in the L layers that are mixtures, when it was computed last; -1 =
    not known, as for the last token, which is not computed. None unless the engine records them.
    """

    id: int
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    routed_experts: npt.NDArray[np.int16] | None = field(default=None, compare=False)


@dataclass(eq=False)
class Generation:
    """A request and what has been generated for it so far: token ids, ln p and policy version of each."""

    request: RolloutRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        begun = self.request.begun
        if begun.token_ids and not self.tokens:
            self.tokens, self.logprobs = [*begun.token_ids], [*begun.logprobs]
            self.versions = [*begun.versions]

    @property
    def priority(self) -> float:
        """Of its request; nobody passes it once it has tokens, because it has run before and had to make room."""
        return -math.inf if self.tokens else self.request.priority


Waiting = TypeVar("Waiting", bound=RolloutRequest | Generation)


def join_line(line: deque[Waiting], new: Iterable[Waiting]) -> None:
    """Let these wait: before those of a higher priority that are last in the line, after all others."""
    for waiting in new:
        place = len(line)
        while place and line[place - 1].priority > waiting.priority:
            place -= 1
        line.insert(place, waiting)


@dataclass
class Counters:
    """Counts since the engine was made.

    num_prompt_tokens: computed tokens that were not decoded, those computed again included. num_shared_prompt_tokens,
    num_prefix_tokens: tokens that were not computed because a request of the same group computed them, or because the
    cache held them. num_preemptions: how often a running request gave its memory back to be computed again later.
    num_draft_tokens: drafted tokens that were computed beside decoding; num_accepted_tokens: those of them that were
    generated.
    """

    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_shared_prompt_tokens: int = 0
    num_prefix_tokens: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def since(self, before: Counters) -> Counters:
        """Return what has been counted since an earlier count."""
        names = [item.name for item in fields(Counters)]
        return Counters(**{name: getattr(self, name) - getattr(before, name) for name in names})

    def prefix_hit_share(self, since: Counters | None = None) -> float:
        """Return the share of all prompt tokens that were not computed, of those since an earlier count if one is
        given; 0 without any."""
        counts = self.since(since or Counters())
        num_reused = counts.num_prefix_tokens + counts.num_shared_prompt_tokens
        total = num_reused + counts.num_prompt_tokens
        return num_reused / total if total else 0.0


@dataclass(frozen=True)
class SlotUse:
    """How full an engine was over some steps, by counts. num_slots: tokens of its fullest step, one for each sequence
    that it decoded; num_tokens: those of all steps. num_drafted, num_accepted: drafted tokens, and those of them that
    were generated, which num_tokens does not count. cost: the seconds that they took; None = nobody needs to know."""

    num_steps: int = 0
    num_slots: int = 0
    num_tokens: int = 0
    cost: StepCost | None = None
    num_drafted: int = 0
    num_accepted: int = 0

    def after(self, num_tokens: int, num_drafted: int = 0, num_accepted: int = 0) -> SlotUse:
        """Return the use after a further step, which generated so many tokens besides accepted drafts."""
        return SlotUse(
            self.num_steps + 1,
            max(self.num_slots, num_tokens),
            self.num_tokens + num_tokens,
            num_drafted=self.num_drafted + num_drafted,
            num_accepted=self.num_accepted + num_accepted,
        )

    @classmethod
    def of_ranks(cls, of_ranks: Sequence[SlotUse]) -> SlotUse:
        """Return the use of the engines of all ranks together: who has ended waits for the last."""
        return cls(
            max((use.num_steps for use in of_ranks), default=0),
            sum(use.num_slots for use in of_ranks),
            sum(use.num_tokens for use in of_ranks),
            num_drafted=sum(use.num_drafted for use in of_ranks),
            num_accepted=sum(use.num_accepted for use in of_ranks),
        )


@dataclass(kw_only=True)
class EngineStats(Counters):
    """Counters, and the state of an engine now.

    num_waiting, num_queueable, num_running: requests that wait, that may still be submitted, and that run.
    """

    state: EngineState
    policy_version: int
    num_waiting: int
    num_queueable: int
    num_running: int
    kv_cache_bytes: int
    kv_cache_used_share: float


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts and on nothing else (BLAKE2b)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
