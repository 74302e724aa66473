"""Sessions of the endpoint: one for each trajectory, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.agents.client import AgentClient, TrajectoryEndedError
from hybrid_rl.agents.trajectory import EndReason
from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import DataError
from hybrid_rl.extras.endpoint.answers import Answer, answer_of
from hybrid_rl.extras.endpoint.refusals import (
    Refusal,
    bad_request,
    failed,
    limit_reached,
    nested_too_deep,
    session_ended,
)
from hybrid_rl.extras.endpoint.requests import AnswerRequest, as_object


class Session:
    """The trajectory of a key. Everything here happens on the event loop that runs its episode.

    path, key: secrets, each of which names it. limit: the one that left the last request without an answer; None if it
    got one. refused_at: the time of the first request since the last answer that a limit left without one. is_cut: the
    last answer was too long, and ends early. failure: gets the exception if something fails that no agent can mend.
    """

    def __init__(self, client: AgentClient) -> None:
        self.path, self.key = secrets.token_urlsafe(16), f"sk-{secrets.token_urlsafe(24)}"
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.limit: EndReason | None = None
        self.refused_at: float | None = None
        self.is_cut = False
        self.failure: asyncio.Future[None] = self.loop.create_future()
        self.is_over = False
        self._rounds = 0  # requests whose answers call tools
        self._asking: set[asyncio.Task[Any] | None] = set()
        self._said = _Said()
        self._texts: list[tuple[str, tuple[int, ...]]] = []  # known from /v1/completions: text, and its tokens

    async def ask(self, request: AnswerRequest) -> list[Answer]:
        """Return the policy's answers. Raises Refusal."""
        if self.is_over:
            raise session_ended()
        task = asyncio.current_task()
        self._asking.add(task)
        try:
            return await self._ask(request)
        except TrajectoryEndedError as error:
            self.limit, self.refused_at = error.reason, self.refused_at or time.monotonic()
            raise limit_reached(error.reason) from None
        except DataError as error:  # of the request, which the agent can mend
            raise bad_request(str(error), "messages" if request.is_chat else "prompt") from error
        except RecursionError:
            raise nested_too_deep() from None
        except Refusal:
            raise
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise failed(error) from error
        finally:
            self._asking.discard(task)

    async def _ask(self, request: AnswerRequest) -> list[Answer]:
        client, prompt = self.client, request.prompt
        most = client.limits.max_tool_calling_iterations
        if most is not None and self._rounds > most:
            raise TrajectoryEndedError("turns")
        shown: Any = prompt
        if isinstance(prompt, str):
            shown = self._tokens_of(prompt)
        elif request.is_chat:
            shown = self._said.restore(shown)
        turns = await client.generate_many(
            shown, request.num_answers, tools=request.tools, max_tokens=request.max_tokens, stop=request.stop
        )
        if any(turn.finish_reason == "abort" for turn in turns):
            raise TrajectoryEndedError("abort")
        last = turns[-1]
        # An agent that asked for no more tokens goes on or ends as it likes.
        is_full = client.tokens_left((*last.prompt_ids, *last.token_ids)) < 1
        self.limit, self.refused_at, self.is_cut = None, None, last.finish_reason == "length" and is_full
        answers = [answer_of(turn, request, client.chat.decode) for turn in turns]
        num_calls = sum(len(answer.calls) for answer in answers)
        client.trajectory.counts["tool_calls"] += num_calls
        self._rounds += num_calls > 0
        for answer in answers:
            if request.is_chat:
                is_begun = shown[-1]["role"] == "assistant"  # then the answer is its rest
                self._said.keep(len(shown) - is_begun, answer)
            if isinstance(prompt, str):
                self._texts.append((prompt + answer.text, (*answer.turn.prompt_ids, *answer.turn.token_ids)))
        return answers

    def _tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a prompt. If it goes on with an earlier one and its answer, these keep their tokens."""
        known = [(start, ids) for start, ids in self._texts if text.startswith(start)]
        if not known:
            return self.client.chat.encode(text)
        start, ids = max(known, key=lambda pair: len(pair[0]))
        return [*ids, *self.client.chat.encode(text[len(start) :], goes_on=True)]

    async def close(self) -> None:
        """End the session, and the requests that are under way; nothing is recorded afterwards."""
        self.is_over = True
        tasks = [task for task in self._asking if task is not None and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()  # if nobody has seen it, the episode was cancelled


class _Said:
    """Answers as clients were given them, with the messages that the chat format made of them.

    A client sends answers back in its own form: without what the policy thought, without the text that ended them,
    with null for empty content. The chat format must see the messages that it knows.
    """

    def __init__(self) -> None:
        self._messages: dict[Any, Mapping[str, Any]] = {}

    def keep(self, place: int, answer: Answer) -> None:
        """Note an answer. place: its place among the messages of its conversation."""
        self._messages[_form(place, answer.text, answer.calls)] = answer.turn.message

    def restore(self, messages: Messages) -> Messages:
        """Return messages with those of the policy as the chat format knows them."""
        return [
            dict(self._messages.get(_form(place, message["content"], message.get("tool_calls", ())), message))
            if message["role"] == "assistant"
            else message
            for place, message in enumerate(messages)
        ]


def _form(place: int, text: str, calls: Sequence[Mapping[str, Any]]) -> Any:
    """Return what a client gives back unchanged."""
    functions = [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in calls]
    call_forms = tuple((i, name, json.dumps(as_object(arguments), sort_keys=True)) for i, name, arguments in functions)
    return place, text.strip(), call_forms
