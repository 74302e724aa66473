"""The client of one trajectory: what an agent asks the policy with."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol

from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.trajectory import Conversation, EndReason, Trajectory, Turn
from hybrid_rl.data.prompts import Messages, shorten
from hybrid_rl.errors import DataError


class TrajectoryEndedError(Exception):
    """A limit ended a trajectory; agents let it pass. reason: the limit, as in `Trajectory.end_reason`. limit: its key
    and value, if they are known."""

    def __init__(self, reason: EndReason, limit: str = "") -> None:
        super().__init__(f"the trajectory has ended: {reason}" + (f" ({limit})" if limit else ""))
        self.reason = reason


class TokenSource(Protocol):
    """An engine as agents see it: token ids in, token ids out, many at a time."""

    async def complete(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed_parts: Sequence[int | str]
    ) -> Completion:
        """Generate at most max_tokens tokens. stop: texts that end the answer, besides those of the configuration.
        seed_parts: all that the noise depends on besides seed and purpose of the rollout."""
        ...


class ChatFormat(Protocol):
    """Messages to token ids and back (`agents/chat.py`)."""

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        known: Sequence[Conversation],
        most_tokens: int | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt. If it goes on with a known conversation, they begin with its tokens, and what
        the template adds for the new messages follows; a prompt that no known conversation begins is rendered whole.
        most_tokens: of a prompt with more, the first so many are enough.
        Raises HistoryRewrittenError if it goes on with one, but the template renders that one differently now and the
        configuration refuses it."""
        ...

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return an answer as an assistant message, with what its prompt had begun of it and with the tool calls that
        are found in it. tools: the schemas that the prompt showed. `tool_call_error` says why a call cannot be read:
        the message then has no `tool_calls`, and its content is the text as it was written."""
        ...

    @property
    def error_role(self) -> Literal["tool", "user"]:
        """The role of the message that tells the policy about a call that could not be read."""
        ...

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Return the tokens of a prompt that is text, as those of a dataset are encoded. goes_on: the text follows
        other tokens, so that none are put before it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        ...


@dataclass(frozen=True)
class Limits:
    """max_completion_length: tokens of a sample after its prompt, those of the environment included. max_length: tokens
    of a sequence that engine and model take. max_tool_calling_iterations: rounds of tool calls, None = no limit.
    max_prompt_length: tokens of the first prompt, None = no limit."""

    max_completion_length: int
    max_length: int
    max_tool_calling_iterations: int | None = None
    max_prompt_length: int | None = None


class AgentClient:
    """Asks the policy for one trajectory, which records every answer.

    place, generation: of the trajectory's row in the rollout, and of the trajectory among those of its row. With the
    tokens of the prompt they decide the noise of an answer: neither the order of the calls nor their delays matter.
    """

    def __init__(
        self,
        tokens: TokenSource,
        chat: ChatFormat,
        trajectory: Trajectory,
        limits: Limits,
        *,
        place: int,
        generation: int,
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self.trajectory, self.limits, self.chat = trajectory, limits, chat
        self._tokens, self._place, self._generation = tokens, place, generation
        self._is_open = is_open
        self._asked: Counter[str] = Counter()
        self._num_asked = 0
        self._told: list[int] = []  # of each conversation of the trajectory, the number of its request

    async def generate(
        self,
        prompt: Sequence[int] | Messages | str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Return the policy's answer to token ids, chat messages or text, and record it. Text is encoded as prompts of
        a dataset are; what goes on with an answer takes token ids or messages, as text would be tokenised again.

        tools: JSON schemas that the chat template shows. max_tokens: of this answer; the trajectory's own limit holds
        besides. Raises TrajectoryEndedError if no token is left, or if the rollout is over; DataError for a first
        prompt that is too long, for a prompt of another type, and for tools that are no schemas.
        """
        turns = await self.generate_many(prompt, 1, tools=tools, max_tokens=max_tokens, stop=stop)
        return turns[0]

    async def generate_many(
        self,
        prompt: Sequence[int] | Messages | str,
        count: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Turn]:
        """Return `count` answers to one prompt, as `generate` does each. The first goes on with the sample that the
        prompt goes on with, every other one begins a sample; which is the first does not depend on their delays."""
        if not self._is_open():
            raise TrajectoryEndedError("abort")
        messages: Any = self.chat.encode(prompt) if isinstance(prompt, str) else prompt
        is_chat = _is_chat(messages)
        _check_schemas(tools)
        earlier, most = self.trajectory.conversations, self.limits.max_length
        ids: list[int] = self.chat.prompt_ids(messages, tools, earlier, most) if is_chat else list(messages)
        longest = self.limits.max_prompt_length
        if not self.trajectory.samples and longest is not None and len(ids) > longest:
            size = str(len(ids)) if len(ids) <= most else f"more than {most}"
            raise DataError(
                f"the prompt of a trajectory has {size} tokens with its tools and what the environment added, but "
                f"the run is planned for {longest}: raise max_prompt_length, or shorten the observation of reset()"
            )
        room = self.tokens_left(ids)
        if room < 1:
            raise TrajectoryEndedError("length", self._length_limit(ids))
        digest = hashlib.blake2b(repr(tuple(ids)).encode(), digest_size=16).hexdigest()
        number, self._num_asked = self._num_asked, self._num_asked + 1
        first = self._asked[digest]
        self._asked[digest] += count
        room = room if max_tokens is None else min(room, max_tokens)
        # An answer that the caller began is one message with what the policy adds to it.
        is_begun = is_chat and messages[-1].get("role") == "assistant"
        before = () if not is_chat else tuple(messages[:-1] if is_begun else messages)
        samples = [self.trajectory.claim(ids, before) for _ in range(count)]
        try:
            completions = await _all(
                self._tokens.complete(
                    ids, max_tokens=room, stop=stop, seed_parts=(self._place, self._generation, digest, first + copy)
                )
                for copy in range(count)
            )
        except BaseException:
            for sample in reversed(samples):
                self.trajectory.release(sample)
            raise
        turns = []
        for completion, sample in zip(completions, samples, strict=True):
            message = self.chat.parse(completion.token_ids, ids, tools)
            where = self.trajectory.record(ids, completion, sample)
            if is_chat:
                known = Conversation((*before, message), tuple(tools), (*ids, *completion.token_ids), sample)
                place = bisect.bisect(self._told, number)
                self._told.insert(place, number)
                self.trajectory.conversations.insert(place, known)
            turns.append(Turn(ids, completion, self.chat.decode(completion.token_ids), message, *where))
        return turns

    def _length_limit(self, prompt_ids: Sequence[int]) -> str:
        """Return the limit that leaves no room for an answer to this prompt."""
        if self.limits.max_length <= len(prompt_ids):
            return f"its next prompt has {len(prompt_ids)} tokens, and sequences at most {self.limits.max_length}"
        return f"max_completion_length={self.limits.max_completion_length}"

    def tokens_left(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens an answer to this prompt may have."""
        sample = self.trajectory.sample_of(prompt_ids)
        start = len(sample.prompt_ids) if sample else len(prompt_ids)
        used = len(prompt_ids) - start
        return min(self.limits.max_completion_length - used, self.limits.max_length - len(prompt_ids))


def _is_chat(prompt: Any) -> bool:
    """Whether a prompt is messages rather than token ids. Raises DataError if it is neither."""
    if not isinstance(prompt, Sequence) or not len(prompt) or not isinstance(prompt[0], Mapping | Integral):
        raise DataError(
            f"a prompt is {shorten(prompt)} of type {type(prompt).__name__}; give a list of messages such as "
            '[{"role": "user", "content": "..."}], a list of token ids, or text'
        )
    return isinstance(prompt[0], Mapping)


def _check_schemas(tools: Sequence[Any]) -> None:
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            name = getattr(tool, "__name__", shorten(tool))
            raise DataError(
                f"generate(tools=) has {name} of type {type(tool).__name__}, but takes JSON schemas, which the policy "
                f"is shown: hybrid_rl.agents.schemas.tool_schema({name}) makes that of a function"
            )


async def _all(calls: Iterable[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    """Wait for all calls; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
