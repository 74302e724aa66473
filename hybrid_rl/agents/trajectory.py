"""Trajectories: what the policy said and what it was told, token by token, as the samples that are trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.turn_record import TrajectoryRecord
from hybrid_rl.data.prompts import Messages, Prompt
from hybrid_rl.errors import DataError

# stop: the agent ended. length, turns, time: a limit of tokens, tool calls or seconds did. error: the agent, its
# environment or its tools failed in a way that no tool message can tell. abort: the engine was stopped.
EndReason = Literal["stop", "length", "turns", "time", "error", "abort"]


@dataclass(frozen=True)
class Turn:
    """One answer of the policy.

    prompt_ids: all that it was shown. completion: the tokens of its answer. text: the answer without special tokens.
    message: the answer as a chat message, {"role": "assistant", "content": ..., "tool_calls": [...]}; tool calls are
    there only if some were parsed. sample, number: where the trajectory keeps it; -1 if none does.
    """

    prompt_ids: Sequence[int]
    completion: Completion
    text: str
    message: Mapping[str, Any]
    sample: int = -1
    number: int = -1

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of the answer."""
        return self.completion.token_ids

    @property
    def logprobs(self) -> Sequence[float]:
        """ln p of each token of the answer."""
        return self.completion.logprobs

    @property
    def versions(self) -> Sequence[int]:
        """Policy version of each token of the answer."""
        return self.completion.versions

    @property
    def finish_reason(self) -> str:
        """Why the answer ended: "stop", "length" or "abort"."""
        return self.completion.finish_reason


@dataclass(eq=False)
class Sample:
    """One sequence of tokens to train on: a prompt, then turns of the policy with tokens of the environment between.

    token_ids: all that follows prompt_ids; mask, logprobs, versions: of each of them, whether the policy made it, its
    ln p (0.0 if not) and its policy version (-1 if not). turns: (start, end) of each turn in token_ids.
    turn_rewards: of each turn, None = nothing was given for it. is_awaited: an answer is under way that belongs here.
    messages: those of the prompt, if it was made of messages. line: the conversation that it tells, the same number for
    all that tell one. claimed, asked: the number of the last request for it, and of the last that was answered.
    routed_experts: int16 [tokens, L, K], the experts of its first tokens, prompt included, as the last answer tells
    them; None = not recorded.
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    is_awaited: bool = False
    messages: tuple[Mapping[str, Any], ...] = ()
    line: int = 0
    claimed: int = 0
    asked: int = 0
    routed_experts: npt.NDArray[np.int16] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of all that follows it."""
        return len(self.prompt_ids) + len(self.token_ids)

    def is_start_of(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt repeats this sample token by token, and perhaps goes on."""
        start = len(self.prompt_ids)
        return (
            len(prompt_ids) >= self.num_tokens
            and tuple(prompt_ids[:start]) == self.prompt_ids
            and list(prompt_ids[start : self.num_tokens]) == self.token_ids
        )

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not make."""
        count = len(token_ids)
        self.token_ids += token_ids
        self.mask += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count

    def add_policy(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        start = len(self.token_ids)
        self.token_ids += completion.token_ids
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.routed_experts = completion.routed_experts
        self.turns.append((start, len(self.token_ids)))
        self.turn_rewards.append(None)


@dataclass(frozen=True)
class Conversation:
    """Messages whose tokens are known: those of a turn's prompt, and its answer last. tools: schemas that the prompt
    was rendered with. token_ids: as the engine read and made them; the template may add an end to the last message.
    sample: that of the answer."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    token_ids: tuple[int, ...]
    sample: Sample | None = field(default=None, compare=False)


class Trajectory:
    """One attempt of the policy at a row of the dataset: one sample, or several if its history was rewritten or if
    agents within it had histories of their own. All of them share its reward.

    row: the columns of the dataset row, prompt included. prompt: as reward functions and logs get it, with what the
    environment added. environment: the object that the trajectory acts on, if any.
    messages: the conversation as a reward function gets it, without the prompt. counts: of "turns", "tool_calls",
    "tool_failures" (those past their time limit included), "tool_timeouts", "forks" (further samples of a conversation
    that has one), "sub_agents" (further conversations). extra: values that go to
    samples.jsonl. metrics: numbers whose means are logged, as agent/NAME. given: rewards by their source, for
    `GivenReward`: a number, None, or the exception instead of one. past: the record of its finished turns and
    calls, None = it has none. is_lost: whether its environment was lost, so that it is to be made again.

    Whoever runs the episode awaits each of on_end when the agent has returned, failed or was cancelled and end_reason
    is set, before the trajectory is scored; and calls each of on_left when nothing looks at its environment any more:
    then already, unless reward functions do; else when its rewards are there or none will be.
    Neither raises, except AgentError, which ends the run.
    """

    def __init__(self, row: Mapping[str, Any] | None = None, *, environment: Any = None) -> None:
        self.row: Mapping[str, Any] = row or {}
        self.prompt: Prompt | None = self.row.get("prompt")
        self.environment = environment
        self.samples: list[Sample] = []
        self.conversations: list[Conversation] = []
        self.messages: Messages = []
        self.reward: float | None = None
        self.end_reason: EndReason | None = None
        self.error = ""
        self.counts: Counter[str] = Counter()
        self.extra: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.given: dict[str, Any] = {}
        self.on_end: list[Callable[[], Awaitable[None]]] = []
        self.on_left: list[Callable[[], None]] = []
        self.past: TrajectoryRecord | None = None
        self.is_lost = False
        self._num_claims = 0

    @property
    def key(self) -> str:
        """Names it, in every life of the run and in no other run; "" for one that is made outside of a rollout. A call
        that it is part of can be known again by it."""
        return "" if self.past is None else self.past.key

    def sample_of(self, prompt_ids: Sequence[int]) -> Sample | None:
        """Return the longest sample that this prompt goes on with, of those that no answer is under way for; None if
        there is none."""
        known = [
            sample
            for sample in self.samples
            if sample.token_ids and not sample.is_awaited and sample.is_start_of(prompt_ids)
        ]
        return max(known, key=lambda sample: sample.num_tokens, default=None)

    def claim(self, prompt_ids: Sequence[int], messages: Sequence[Mapping[str, Any]] = ()) -> Sample:
        """Return the sample that the answer to this prompt will belong to: the one that the prompt goes on with, else a
        new one. So it is decided by the order in which the policy is asked, not by the order of its answers. `record`
        or `release` must follow. messages: those of the prompt, if it is made of messages."""
        sample = self.sample_of(prompt_ids)
        if sample is None:
            line = self._line_of(prompt_ids, messages)
            sample = Sample(tuple(prompt_ids), messages=tuple(messages), line=line)
            self.samples.append(sample)
        self._num_claims += 1
        sample.is_awaited, sample.claimed = True, self._num_claims
        return sample

    def _line_of(self, prompt_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the conversation that a new sample tells: one whose first prompt its own begins with, else one of
        which it tells an answer again, as after its first messages were dropped; else a new one."""
        openings: dict[int, Sample] = {}
        for sample in self.samples:
            openings.setdefault(sample.line, sample)
        plain_messages = [_plain(message) for message in messages]
        begun = [
            (len(opening.messages or opening.prompt_ids), line)
            for line, opening in openings.items()
            if (
                plain_messages[: len(opening.messages)] == list(map(_plain, opening.messages))
                if opening.messages and plain_messages
                else tuple(prompt_ids[: len(opening.prompt_ids)]) == opening.prompt_ids
            )
        ]
        if begun:
            return max(begun)[1]
        for known in reversed(self.conversations):
            if known.sample is not None and _plain(known.messages[-1]) in plain_messages:
                return known.sample.line
        for sample in () if plain_messages else reversed(self.samples):
            if sample.token_ids and _holds(prompt_ids, sample.token_ids):
                return sample.line
        return len(openings)

    def release(self, sample: Sample) -> None:
        """Give up a claim: there will be no answer. A sample without any is left out if the last, so that no other
        changes its place."""
        sample.is_awaited = False
        if not sample.token_ids and self.samples and self.samples[-1] is sample:
            self.samples.pop()

    def record(
        self, prompt_ids: Sequence[int], completion: Completion, sample: Sample | None = None
    ) -> tuple[int, int]:
        """Keep a turn, in the sample that was claimed for it (None = that is done now). Return the places of sample and
        turn, as `add_reward` takes them."""
        sample = sample or self.claim(prompt_ids)
        sample.is_awaited = False
        if not any(other is sample for other in self.samples):
            self.samples.append(sample)
        if not sample.token_ids and (others := [other.line for other in self.samples if other.token_ids]):
            self.counts["forks" if sample.line in others else "sub_agents"] += 1
        sample.asked = sample.claimed
        sample.add_environment(prompt_ids[sample.num_tokens :])
        sample.add_policy(completion)
        self.counts["turns"] += 1
        return next(place for place, other in enumerate(self.samples) if other is sample), len(sample.turns) - 1

    def add_reward(self, value: float, turn: Turn | None = None) -> None:
        """Add to the reward of the trajectory, or of one of its recorded turns. Raises DataError for a turn that this
        trajectory does not have, and for what is not a number."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise DataError(f"add_reward({value!r:.80}) got a {type(value).__name__}; give a number") from None
        if turn is None:
            self.reward = (self.reward or 0.0) + number
            return
        if not (0 <= turn.sample < len(self.samples) and 0 <= turn.number < len(self.samples[turn.sample].turns)):
            raise DataError("add_reward(..., turn=...) got a turn of another trajectory; give one of its own")
        rewards = self.samples[turn.sample].turn_rewards
        rewards[turn.number] = (rewards[turn.number] or 0.0) + number

    def end(self, reason: EndReason, error: str = "") -> None:
        """Note why it ended; the first reason stays."""
        if self.end_reason is None:
            self.end_reason, self.error = reason, error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the keys that hold nothing."""
    return {key: value for key, value in message.items() if value is not None}


def _holds(token_ids: Sequence[int], part: Sequence[int]) -> bool:
    """Whether tokens hold others, side by side and in order."""
    all_ids, size, wanted = list(token_ids), len(part), list(part)
    starts = range(len(all_ids) - size + 1)
    return any(all_ids[start] == wanted[0] and all_ids[start : start + size] == wanted for start in starts)
