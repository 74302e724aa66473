"""A policy without a model, for tests of what lies around it: tokens are bytes, and a function writes its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_rl.agents.client import AgentClient, Limits
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.episode import Agent, Episode
from hybrid_rl.agents.trajectory import Conversation, Trajectory

BOS, EOS = 256, 257


class ByteChat:
    """A ChatFormat that knows a conversation again only if its messages come back exactly as it made them."""

    error_role = "tool"

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        known: Sequence[Conversation],
        most_tokens: int | None = None,
    ) -> list[int]:
        fitting = [
            one for one in known if tuple(messages[: len(one.messages)]) == one.messages and one.tools == tuple(tools)
        ]
        base = max(fitting, key=lambda one: len(one.messages), default=None)
        names = " ".join(tool["function"]["name"] for tool in tools)
        start = list(base.token_ids) if base else self.encode(f"<{names}>" if names else "")
        new = messages[len(base.messages) :] if base else messages
        rendered = "".join(f"[{one['role']}]{one['content']}{_calls(one)}\n" for one in new)
        return [*start, *self.encode(f"{rendered}[assistant]", goes_on=True)]

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        thought, _, text = self.decode(token_ids).rpartition("|")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if text.startswith("CALL "):
            _, name, arguments = text.split(" ", 2)
            function = {"name": name, "arguments": json.loads(arguments)}
            message |= {"content": "", "tool_calls": [{"id": "callabc12", "type": "function", "function": function}]}
        return message

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        return [*([] if goes_on else [BOS]), *text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < BOS).decode(errors="replace")


def _calls(message: Mapping[str, Any]) -> str:
    return json.dumps(message["tool_calls"]) if "tool_calls" in message else ""


class ScriptedTokens:
    """A TokenSource. write: the answer to a prompt's text, or the exception that the engine raises; delay: seconds that
    an answer takes, by its number. asked, cancelled: the seed parts of requests, in order."""

    def __init__(self, write: Callable[[str], str | Exception], delay: Callable[[int], float] = lambda _: 0.0) -> None:
        self.write, self.delay = write, delay
        self.asked: list[Sequence[int | str]] = []
        self.cancelled: list[Sequence[int | str]] = []

    async def complete(
        self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str], seed_parts: Sequence[int | str]
    ) -> Completion:
        self.asked.append(seed_parts)
        try:
            await asyncio.sleep(self.delay(len(self.asked)))
        except asyncio.CancelledError:
            self.cancelled.append(seed_parts)
            raise
        text = self.write(ByteChat().decode(prompt_ids))
        if isinstance(text, Exception):
            raise text
        found = [text.find(one) + len(one) for one in stop if one in text]
        ids = [*text[: min(found)].encode()] if found else [*text.encode(), EOS]
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        return Completion(ids, [-0.25 * (place % 4) for place in range(len(ids))], [7] * len(ids), reason)


def episode_of(
    tokens: ScriptedTokens,
    row: Mapping[str, Any] | None = None,
    *,
    limits: Limits | None = None,
    place: int = 0,
) -> Episode:
    """Return an episode that has not begun."""
    trajectory = Trajectory(row or {})
    limits = limits or Limits(max_completion_length=10_000, max_length=20_000)
    client = AgentClient(tokens, ByteChat(), trajectory, limits, place=place, generation=0)
    columns = {name: value for name, value in trajectory.row.items() if name != "prompt"}
    return Episode(trajectory.prompt, columns, client, trajectory, "a trainer state")


def text_of(token_ids: Sequence[int]) -> str:
    """Return tokens as text, one character each."""
    return "".join({BOS: "<s>", EOS: "</s>"}.get(token) or chr(token) for token in token_ids)


async def run_agent(agent: Agent, episode: Episode) -> Trajectory:
    """Run an episode as a rollout does, except that exceptions come out."""
    await agent(episode)
    episode.trajectory.end("stop")
    return episode.trajectory
