"""The client of one trajectory: what an agent asks the policy with."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hybrid_rl.agents.trajectory import Completion, Conversation, EndReason, Trajectory, Turn
from hybrid_rl.data.prompts import Messages


class TrajectoryEndedError(Exception):
    """A limit ended a trajectory; agents let it pass. reason: the limit, as in `Trajectory.end_reason`."""

    def __init__(self, reason: EndReason) -> None:
        super().__init__(f"the trajectory has ended: {reason}")
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
    ) -> list[int]:
        """Return the tokens of a prompt. If it goes on with a known conversation, they begin with its tokens, and what
        the template adds for the new messages follows; a prompt that no known conversation begins is rendered whole.
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

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        ...


@dataclass(frozen=True)
class Limits:
    """max_completion_length: tokens of a sample after its prompt, those of the environment included. max_length: tokens
    of a sequence that engine and model take. max_tool_calling_iterations: rounds of tool calls, None = no limit."""

    max_completion_length: int
    max_length: int
    max_tool_calling_iterations: int | None = None


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

    async def generate(
        self,
        prompt: Sequence[int] | Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Return the policy's answer to token ids or chat messages, and record it.

        tools: JSON schemas that the chat template shows. max_tokens: of this answer; the trajectory's own limit holds
        besides. Raises TrajectoryEndedError if no token is left, or if the rollout is over.
        """
        if not self._is_open():
            raise TrajectoryEndedError("abort")
        is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
        messages: Any = prompt
        ids: list[int] = (
            self.chat.prompt_ids(messages, tools, self.trajectory.conversations) if is_chat else list(messages)
        )
        room = self.tokens_left(ids)
        if room < 1:
            raise TrajectoryEndedError("length")
        digest = hashlib.blake2b(repr(tuple(ids)).encode(), digest_size=16).hexdigest()
        asked, self._asked[digest] = self._asked[digest], self._asked[digest] + 1
        completion = await self._tokens.complete(
            ids,
            max_tokens=room if max_tokens is None else min(room, max_tokens),
            stop=stop,
            seed_parts=(self._place, self._generation, digest, asked),
        )
        message = self.chat.parse(completion.token_ids, ids, tools)
        sample, number = self.trajectory.record(ids, completion)
        if is_chat:
            # An answer that the caller began is one message with what the policy added to it.
            before = messages[:-1] if messages[-1].get("role") == "assistant" else messages
            known = Conversation((*before, message), tuple(tools), (*ids, *completion.token_ids))
            self.trajectory.conversations.append(known)
        return Turn(ids, completion, self.chat.decode(completion.token_ids), message, sample, number)

    def tokens_left(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens an answer to this prompt may have."""
        sample = self.trajectory.sample_of(prompt_ids)
        start = len(sample.prompt_ids) if sample else len(prompt_ids)
        used = len(prompt_ids) - start
        return min(self.limits.max_completion_length - used, self.limits.max_length - len(prompt_ids))
