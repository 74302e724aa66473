"""The OpenAI-compatible endpoint, with the real client of OpenAI and with plain HTTP."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest

from hybrid_rl.agents.client import Limits, TrajectoryEndedError
from hybrid_rl.agents.completion import Completion
from hybrid_rl.agents.parsing import argument_types
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.errors import ConfigError, DataError, EngineStateError, MessagesRefusedError
from hybrid_rl.extras.endpoint import http_agent
from hybrid_rl.extras.endpoint import routes as app
from hybrid_rl.extras.endpoint.answers import token_texts
from hybrid_rl.extras.endpoint.http_agent import HttpAgent
from tests.support.inside.agents import replace_agent
from tests.unit.agents.scripted import EOS, ByteChat, ScriptedTokens, episode_of, run_agent, text_of

QUESTION: Any = {"role": "user", "content": "2+3?"}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "strict": True, "parameters": {"type": "object"}},
}


def client_of(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def run(
    function: Callable[..., Any],
    tokens: ScriptedTokens | None = None,
    *,
    temperature: float = 1.0,
    limits: Limits | None = None,
    chat: ByteChat | None = None,
) -> Trajectory:
    """Run one episode with an endpoint of its own."""

    async def main() -> Trajectory:
        agent = HttpAgent(function, temperature=temperature)
        episode = episode_of(tokens or ScriptedTokens(lambda _: "5"), {"a": 1, "b": [1]}, limits=limits)
        episode.client.chat = chat or episode.client.chat
        try:
            return await run_agent(agent, episode)
        finally:
            agent.close()

    return asyncio.run(main())


# ------------------------------------------------------------------------------------------------------ answers


def test_two_turns_of_the_openai_client_are_one_sample() -> None:
    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": "Add."}]}, QUESTION]
            first = await client.chat.completions.create(
                model="gpt-4o", messages=messages, temperature=1, top_p=1.0, seed=3, user="u", logprobs=True
            )
            choice = first.choices[0]
            assert (first.model, choice.finish_reason, choice.message.content) == ("gpt-4o", "stop", "5")
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [(t.token, t.logprob) for t in choice.logprobs.content] == [("5", 0.0), ("", -0.25)]
            assert first.usage is not None
            assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (36, 2)
            messages += [choice.message, {"role": "user", "content": "Sure?"}]
            await client.chat.completions.create(model="gpt-4o", messages=messages)
            return 0.5

    trajectory = run(agent)
    (sample,) = trajectory.samples
    assert text_of(sample.prompt_ids) == "<s>[system]Add.\n[user]2+3?\n[assistant]"
    assert len(sample.prompt_ids) == 36
    assert text_of(sample.token_ids) == "5</s>[user]Sure?\n[assistant]5</s>"
    assert sample.turns == [(0, 2), (25, 27)]
    assert sample.logprobs[:2] == [0.0, -0.25]
    assert sample.versions[:3] == [7, 7, -1]
    assert (trajectory.reward, trajectory.end_reason, trajectory.counts["turns"]) == (0.5, "stop", 2)


@pytest.mark.parametrize("streams", [False, True])
def test_tools_go_there_and_back(streams: bool) -> None:
    def write(prompt: str) -> str:
        return "I know|5" if "[tool]5" in prompt else 'I think|CALL add {"b": 3, "a": 2}'

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            messages: list[Any] = [QUESTION]
            ask: dict[str, Any] = {"model": "m", "messages": messages, "tools": [ADD], "tool_choice": "auto"}
            if streams:
                content, calls, reasons = "", [], []
                options = {"include_usage": True}
                async for chunk in await client.chat.completions.create(**ask, stream=True, stream_options=options):
                    last = chunk
                    for choice in chunk.choices:
                        content += choice.delta.content or ""
                        calls += choice.delta.tool_calls or []
                        reasons += [choice.finish_reason] if choice.finish_reason else []
                assert (content, reasons, calls[0].index) == ("", ["tool_calls"], 0)
                assert last.usage is not None and last.usage.completion_tokens == 34
                message: Any = {"role": "assistant", "content": None, "tool_calls": [calls[0].model_dump()]}
            else:
                answer = await client.chat.completions.create(**ask)
                assert answer.choices[0].finish_reason == "tool_calls"
                message = answer.choices[0].message
                assert message.content is None
                assert message.reasoning_content == "I think"
                calls = message.tool_calls
            assert (calls[0].id, calls[0].type, calls[0].function.name) == ("callabc12", "function", "add")
            assert json.loads(calls[0].function.arguments) == {"a": 2, "b": 3}
            messages += [message, {"role": "tool", "tool_call_id": "callabc12", "content": "5"}]
            answer = await client.chat.completions.create(**ask)
            assert answer.choices[0].message.content == "5"

    trajectory = run(agent, ScriptedTokens(write))
    (sample,) = trajectory.samples
    assert text_of(sample.prompt_ids) == "<s><add>[user]2+3?\n[assistant]"
    assert text_of(sample.token_ids) == 'I think|CALL add {"b": 3, "a": 2}</s>[tool]5\n[assistant]I know|5</s>'
    assert (trajectory.counts["tool_calls"], trajectory.counts["forks"], trajectory.reward) == (1, 0, None)
    assert "strict" not in trajectory.conversations[0].tools[0]["function"]


def test_calls_without_tools_are_text() -> None:
    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            answer = await client.chat.completions.create(
                model="m", messages=[QUESTION], tools=[ADD], tool_choice="none"
            )
            choice = answer.choices[0]
            assert (choice.message.content, choice.message.tool_calls) == ("CALL add {}", None)
            assert choice.finish_reason == "stop"

    trajectory = run(agent, ScriptedTokens(lambda _: "CALL add {}"))
    assert "<add>" not in text_of(trajectory.samples[0].prompt_ids)


@pytest.mark.parametrize("first_seconds", [0.0, 0.05])
def test_several_answers_lie_in_order_whichever_comes_first(first_seconds: float) -> None:
    class Numbered(ScriptedTokens):
        async def complete(self, prompt_ids: Any, **options: Any) -> Completion:
            made = await super().complete(prompt_ids, **options)
            return replace(made, token_ids=[48 + options["seed_parts"][-1], EOS])

    tokens = Numbered(lambda _: "5", delay=lambda number: first_seconds if number == 1 else 0.02)

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            answer = await client.chat.completions.create(model="m", messages=[QUESTION], n=2)
            assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "0"), (1, "1")]
            assert answer.usage is not None and answer.usage.completion_tokens == 4

    trajectory = run(agent, tokens)
    assert [text_of(sample.token_ids) for sample in trajectory.samples] == ["0</s>", "1</s>"]
    assert trajectory.counts["forks"] == 1


def test_a_stop_text_ends_the_answer_and_stays_in_the_sample() -> None:
    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            answer = await client.chat.completions.create(model="m", messages=[QUESTION], stop=["Obs:", "x"])
            assert answer.choices[0].message.content == "Add 2 and 3. "
            messages: Any = [QUESTION, answer.choices[0].message, {"role": "user", "content": "Obs: 5"}]
            await client.chat.completions.create(model="m", messages=messages, max_tokens=3)

    trajectory = run(agent, ScriptedTokens(lambda _: "Add 2 and 3. Obs: 6"))
    (sample,) = trajectory.samples
    assert text_of(sample.token_ids) == "Add 2 and 3. Obs:[user]Obs: 5\n[assistant]Add"
    assert trajectory.end_reason == "stop"  # it asked for no more than 3 tokens
    full = run(agent, ScriptedTokens(lambda _: "Add 2 and 3. Obs: 6"), limits=Limits(len(sample.token_ids), 20_000))
    assert full.end_reason == "length"


def test_completions_go_on_with_the_tokens_that_were_made() -> None:
    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            first = await client.completions.create(model="m", prompt="2+3=", logprobs=0)
            choice = first.choices[0]
            assert choice.logprobs is not None
            assert (choice.text, choice.finish_reason) == ("5", "stop")
            assert (choice.logprobs.tokens, choice.logprobs.text_offset) == (["5", ""], [0, 1])
            text = ""
            async for chunk in await client.completions.create(model="m", prompt="2+3=5;", stream=True):
                text += chunk.choices[0].text
            assert text == "5"
            ids = await client.completions.create(model="m", prompt=[65, 66], extra_body={"return_token_ids": True})
            assert (ids.choices[0].token_ids, ids.prompt_token_ids) == ([53, EOS], [65, 66])  # type: ignore[attr-defined]

    first, second = run(agent).samples
    assert text_of([*first.prompt_ids, *first.token_ids]) == "<s>2+3=5</s>;5</s>"
    assert text_of([*second.prompt_ids, *second.token_ids]) == "AB5</s>"


def test_characters_of_several_tokens_belong_to_the_last_of_them() -> None:
    ids = ByteChat().encode("aé€")
    assert token_texts(ByteChat().decode, ids) == ["", "a", "", "é", "", "", "€"]
    assert token_texts(ByteChat().decode, ids[:-1]) == ["", "a", "", "é", "", "\ufffd"]


# ----------------------------------------------------------------------------------------------------- refusals

NESTED = json.loads("[" * 400 + "]" * 400)
CALL: Any = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(**changes: Any) -> list[Any]:
    return [{"role": "assistant", "content": "1", **changes}, QUESTION]


def shown(**changes: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **changes}}]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7}, "trains with temperature=0.5"),
    ({"temperature": 0}, "trains with temperature=0.5"),
    ({"top_p": 0.9}, "biases training"),
    ({"top_k": 20}, "biases training"),
    ({"min_p": 0.1}, "biases training"),
    ({"frequency_penalty": 0.1}, "biases training"),
    ({"logit_bias": {"5": 1}}, "biases training"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "constrained decoding"),
    ({"tools": [ADD], "tool_choice": "required"}, "constrained decoding"),
    ({"tools": [{"type": "custom"}]}, "a tool must be"),
    ({"parallel_tool_calls": False}, "answer all of them"),
    ({"logprobs": True, "top_logprobs": 2}, "the token that it chose only"),
    ({"n": 0}, "from 1 to 128"),
    ({"max_tokens": "many"}, "whole number"),
    ({"stop": [""]}, "none empty"),
    ({"frobnicate": 1}, "unknown parameter"),
    ({"messages": []}, "a message at least"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "no role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "other than text"),
    ({"tools": shown(parameters="x")}, "the parameters of the tool f must be a JSON schema"),
    ({"tools": shown(parameters={"properties": ["a"]})}, "the parameters of the tool f must be a JSON schema"),
    ({"messages": said(tool_calls=5)}, "messages[0].tool_calls=5 must be a list"),
    ({"messages": said(tool_calls=[CALL | {"id": [1]}])}, "messages[0].tool_calls.id=[1] must be a text"),
    (
        {"messages": said(tool_calls=[{"function": {"name": "f", "arguments": 5}}])},
        "messages[0] has a tool call whose arguments are no object",
    ),
    ({"messages": [QUESTION | {"name": ["a"]}]}, "messages[0].name=['a'] must be a text"),
    ({"messages": [{"role": "tool", "content": "5", "tool_call_id": 7}]}, "messages[0].tool_call_id=7 must be a"),
    ({"stop": "a\ud800"}, r"stop='a\ud800' is not valid Unicode: '\ud800' is half of a surrogate pair"),
    ({"stop": ["a", "\udc00"]}, r"stop=['a', '\udc00'] is not valid Unicode"),
    ({"tools": shown(name="f\ud800")}, r"'\ud800' is half of a surrogate pair"),
    ({"tools": shown(parameters={"properties": {"\ud800": {}}})}, r"'\ud800' is half of a surrogate pair"),
    ({"prompt": "a\ud800"}, r"prompt='a\ud800' is not valid Unicode"),
]
# Parameters of a tool.
SILENT: list[Any] = [
    None,
    {},
    {"properties": None},
    {"properties": []},
    {"properties": {"a": True}},
    {"properties": {"a": {"type": 5, "anyOf": 5, "oneOf": [["x"]]}, "b": {"type": [["x"], "string"]}}},
]
HARMLESS: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "logit_bias": {}, "seed": 1}
HARMLESS |= {"presence_penalty": 0.0, "response_format": {"type": "text"}, "stop": None, "frobnicate": None}


async def post(url: str, key: str | None, body: Any) -> tuple[int, dict[str, Any], Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


def test_what_biases_training_or_can_be_mended_is_refused_with_the_reason() -> None:
    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        url = f"{base_url}/chat/completions"
        for given, reason in REFUSED:
            asked = f"{base_url}/completions" if "prompt" in given else url
            status, answer, _ = await post(asked, api_key, {"messages": [QUESTION]} | given)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), given
            assert reason in answer["error"]["message"], given
        harmless = [HARMLESS, {"temperature": 0.5}, *({"tools": shown(parameters=one)} for one in SILENT)]
        for given in harmless:
            status, answer, _ = await post(url, api_key, {"messages": [QUESTION], **given})
            assert status == 200, answer
        status, answer, _ = await post(f"{base_url}/responses", api_key, {})
        assert status == 404 and "chat completions" in answer["error"]["message"]
        async with aiohttp.ClientSession() as session, session.post(url, data=b"{", headers={}) as bad:
            assert bad.status == 400 and "not JSON" in (await bad.json())["error"]["message"]

    assert run(agent, temperature=0.5).counts["turns"] == 2 + len(SILENT)  # a refusal costs nothing


@pytest.mark.parametrize("parameters", SILENT)
def test_schemas_that_say_little_declare_nothing(parameters: Any) -> None:
    declared = argument_types(shown(parameters=parameters))["f"]
    assert declared.get("a", frozenset()) == frozenset()
    assert declared.get("b", frozenset({"string"})) == {"string"}


def test_messages_that_the_chat_template_refuses_can_be_mended() -> None:
    class Picky(ByteChat):
        def prompt_ids(self, messages: Any, tools: Any, known: Any, most_tokens: Any = None) -> list[int]:
            if len(messages) > 1:
                raise MessagesRefusedError("the template refuses two messages; correct them")
            return super().prompt_ids(messages, tools, known)

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            with pytest.raises(openai.BadRequestError, match="the template refuses two messages; correct them"):
                await client.chat.completions.create(model="policy", messages=[QUESTION, QUESTION])
            answer = await client.chat.completions.create(model="policy", messages=[QUESTION])
            return float(answer.choices[0].message.content == "5")

    trajectory = run(agent, chat=Picky())
    assert (trajectory.reward, trajectory.error) == (1.0, "")


def test_a_key_opens_its_own_trajectory_only() -> None:
    body = {"messages": [QUESTION]}

    async def main() -> None:
        places: list[tuple[str, str]] = []
        both = asyncio.Barrier(2)

        async def agent(row: dict[str, Any], base_url: str, api_key: str, trajectory: Trajectory) -> None:
            places.append((base_url, api_key))
            while len(places) < 2:
                await asyncio.sleep(0.001)
            mine = places.index((base_url, api_key))
            other = places[1 - mine]
            root = base_url.partition("/t/")[0]
            url = f"{base_url}/chat/completions"
            for where, key, expected in (
                (url, api_key, 200),
                (url, None, 200),
                (f"{root}/v1/chat/completions", api_key, 200),
                (url, other[1], 401),
                (url, "sk-wrong", 401),
                (f"{root}/v1/chat/completions", "sk-wrong", 401),
                (f"{root}/v1/chat/completions", None, 401),
                (f"{root}/t/guess/v1/chat/completions", api_key, 401),
            ):
                status, answer, _ = await post(where, key, body)
                assert status == expected, (where, key, answer)
                assert expected == 200 or answer["error"]["code"] == "invalid_api_key"
            assert trajectory.counts["turns"] == 3
            await both.wait()

        http = HttpAgent(agent, temperature=1.0)
        tokens = ScriptedTokens(lambda _: "5")
        await asyncio.gather(run_agent(http, episode_of(tokens)), run_agent(http, episode_of(tokens, place=1)))
        http.close()

    asyncio.run(main())


def test_a_prompt_without_room_ends_the_trajectory_unless_the_agent_helps_itself() -> None:
    limits = Limits(max_completion_length=20, max_length=40)
    long: Any = [{"role": "user", "content": "x" * 40}]

    async def gives_up(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=long)

    async def goes_on(row: dict[str, Any], base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
                await client.chat.completions.create(model="m", messages=long)
            assert error.value.code == "context_length_exceeded"
            if row["a"] == 1:
                await client.chat.completions.create(model="m", messages=[QUESTION])
            return 1.0

    with pytest.raises(TrajectoryEndedError, match="length"):
        run(gives_up, limits=limits)
    assert run(goes_on, limits=limits).end_reason == "stop"

    async def swallows(row: dict[str, Any], base_url: str, api_key: str) -> float:
        return await goes_on({"a": 2}, base_url, api_key)

    ended = run(swallows, limits=limits)
    assert (ended.end_reason, ended.reward) == ("length", 1.0)


def test_rounds_of_tool_calls_are_limited() -> None:
    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        body = {"messages": [QUESTION], "tools": [ADD]}
        found = [(await post(f"{base_url}/chat/completions", api_key, body))[0] for _ in range(4)]
        assert found == [200, 200, 200, 400]

    limits = Limits(10_000, 20_000, max_tool_calling_iterations=2)
    trajectory = run(agent, ScriptedTokens(lambda _: "CALL add {}"), limits=limits)
    assert trajectory.end_reason == "turns"


# ------------------------------------------------------------------------------------------- sessions and threads


def test_256_sessions_at_once_then_503_and_nothing_left() -> None:
    before = set(threading.enumerate())
    used: list[tuple[str, str]] = []

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        status, answer, _ = await post(f"{base_url}/chat/completions", api_key, {"messages": [QUESTION]})
        assert status == 200
        used.append((base_url, api_key))
        return float(answer["usage"]["completion_tokens"])

    async def main() -> None:
        http = HttpAgent(agent, temperature=1.0)
        tokens = ScriptedTokens(lambda _: "5", delay=lambda number: 0.01 * (number % 7))
        episodes = [episode_of(tokens, place=place) for place in range(256)]
        ended = await asyncio.gather(*(run_agent(http, episode) for episode in episodes))
        assert [trajectory.reward for trajectory in ended] == [2.0] * 256
        assert all(trajectory.counts["turns"] == 1 for trajectory in ended)
        assert len({url for url, _ in used}) == len({key for _, key in used}) == 256
        (url, key), body = used[0], {"messages": [QUESTION]}
        status, answer, headers = await post(f"{url}/chat/completions", key, body)
        assert (status, answer["error"]["code"], int(headers["Retry-After"]) > 0) == (503, "no_rollout", True)

        async def asks_for_an_ended_one(row: dict[str, Any], base_url: str, api_key: str) -> None:
            status, answer, _ = await post(f"{url}/chat/completions", key, body)
            assert (status, answer["error"]["code"]) == (410, "session_ended")

        replace_agent(http, asks_for_an_ended_one)
        await run_agent(http, episode_of(tokens))
        http.close()
        port = int(url.split(":")[2].partition("/")[0])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    asyncio.run(main())
    assert set(threading.enumerate()) <= before


def test_a_client_that_goes_away_cancels_its_request() -> None:
    tokens = ScriptedTokens(lambda _: "5", delay=lambda number: 60.0 if number == 1 else 0.0)

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[QUESTION]))
            while not tokens.asked:
                await asyncio.sleep(0.001)
            asking.cancel()
            while not tokens.cancelled:
                await asyncio.sleep(0.001)
            await client.chat.completions.create(model="m", messages=[QUESTION])

    trajectory = run(agent, tokens)
    assert (len(tokens.cancelled), trajectory.counts["turns"]) == (1, 1)


def test_what_is_under_way_ends_with_its_trajectory() -> None:
    tokens = ScriptedTokens(lambda _: "5", delay=lambda _: 60.0)
    answers: list[tuple[int, dict[str, Any], Any]] = []
    left: list[asyncio.Task[None]] = []

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async def ask() -> None:
            answers.append(await post(f"{base_url}/chat/completions", api_key, {"messages": [QUESTION]}))

        left.append(asyncio.ensure_future(ask()))
        while not tokens.asked:
            await asyncio.sleep(0.001)

    async def waits(row: dict[str, Any], base_url: str, api_key: str) -> None:
        await post(f"{base_url}/chat/completions", api_key, {"messages": [QUESTION]})

    async def main() -> None:
        http = HttpAgent(agent, temperature=1.0)
        trajectory = await run_agent(http, episode_of(tokens))
        assert (len(tokens.cancelled), trajectory.samples) == (1, [])
        while not answers:
            await asyncio.sleep(0.001)
        assert answers[0][0] == 410
        # A trajectory past its time is cancelled from outside.
        replace_agent(http, waits)
        waiting = asyncio.ensure_future(run_agent(http, episode_of(tokens)))
        while len(tokens.asked) < 2:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(tokens.cancelled) == 2
        http.close()

    asyncio.run(main())


def test_slow_streams_stay_alive_and_tell_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE_SECONDS", 0.01)
    body = {"messages": [QUESTION], "stream": True}

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            chunks = await client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == "5"
            with pytest.raises(openai.APIError, match="nothing more is generated"):
                chunks = await client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
                [chunk async for chunk in chunks]
            async with aiohttp.ClientSession() as http, http.post(f"{base_url}/chat/completions", json=body) as answer:
                assert (await answer.text()).startswith(": the policy is writing\n\n")

    answers = iter(["5", TrajectoryEndedError("time"), "5"])
    assert run(agent, ScriptedTokens(lambda _: next(answers), delay=lambda _: 0.05)).counts["turns"] == 2


def test_a_proxy_does_not_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=[QUESTION])

    assert run(agent).counts["turns"] == 1
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1"


def test_an_engine_that_fails_ends_the_episode_whatever_the_agent_does() -> None:
    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> None:
        await post(f"{base_url}/chat/completions", api_key, {"messages": [QUESTION]})
        await asyncio.sleep(60)

    with pytest.raises(EngineStateError, match="broken"):
        run(agent, ScriptedTokens(lambda _: EngineStateError("the engine is broken")))


def test_a_plain_function_that_works_on_is_left_behind() -> None:
    goes_on, threads = threading.Event(), queue.SimpleQueue[threading.Thread]()

    def plain(row: dict[str, Any], base_url: str, api_key: str) -> float:
        threads.put(threading.current_thread())
        goes_on.wait(10)
        return 1.0

    async def main() -> None:
        http, episode = HttpAgent(plain, temperature=1.0), episode_of(ScriptedTokens(lambda _: "5"))
        running = asyncio.ensure_future(http(episode))
        while threads.empty():
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        goes_on.set()
        threads.get().join()
        http.close()
        assert episode.trajectory.reward is None

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- functions


def test_what_a_function_may_take_and_return() -> None:
    async def everything(row: dict[str, Any], base_url: str, api_key: str, **kw: Any) -> dict[str, Any]:
        row["b"].append(2)  # of a copy
        assert sorted(kw) == ["environment", "trainer_state", "trajectory"]
        assert kw["trainer_state"] == "a trainer state"
        return {"reward": 2, "note": "well done", "score": 3}

    trajectory = run(everything)
    assert (trajectory.reward, trajectory.extra, trajectory.row) == (
        2.0,
        {"note": "well done", "score": 3},
        {"a": 1, "b": [1]},
    )

    assert trajectory.metrics == {"score": 3.0}

    def plain(row: dict[str, Any], base_url: str, api_key: str, trainer_state: Any = None) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            answer = client.chat.completions.create(model="m", messages=[QUESTION])
        assert trainer_state == "a trainer state"
        return float(answer.choices[0].message.content or 0)

    assert run(plain).reward == 5.0

    async def blocks(row: dict[str, Any], base_url: str, api_key: str) -> float:
        return plain(row, base_url, api_key, "a trainer state")

    assert run(blocks).reward == 5.0

    @functools.wraps(blocks)
    def runs_it(*args: Any) -> float:
        return asyncio.run(blocks(*args))

    @functools.wraps(blocks)
    def passes_it_on(*args: Any) -> Any:
        return blocks(*args)

    class Callable:
        async def __call__(self, row: dict[str, Any], base_url: str, api_key: str, factor: float = 1.0) -> float:
            return factor * plain(row, base_url, api_key, "a trainer state")

    assert run(runs_it).reward == run(passes_it_on).reward == 5.0
    assert run(functools.partial(Callable(), factor=2.0)).reward == 10.0
    for value in ("good", float("nan"), {"reward": "good"}, {1: 2.0}):
        with pytest.raises(DataError, match="the agent returned"):
            run(lambda row, base_url, api_key, value=value: value)
    for wrong in (lambda row: 1.0, lambda row, base_url, api_key, *, nothing_known: 1.0, 5):
        with pytest.raises(ConfigError, match="row, base_url, api_key"):
            HttpAgent(wrong, temperature=1.0)


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3), StopIteration(), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [True, False])
def test_what_a_function_raises_comes_out(error: BaseException, is_async: bool) -> None:
    async def coroutine(row: dict[str, Any], base_url: str, api_key: str) -> None:
        raise error

    def plain(row: dict[str, Any], base_url: str, api_key: str) -> None:
        raise error

    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    caught: list[BaseException] = []

    async def main() -> None:
        http = HttpAgent(coroutine if is_async else plain, temperature=1.0)
        try:
            await http(episode_of(ScriptedTokens(lambda _: "5")))
        except BaseException as raised:
            caught.append(raised)
        http.close()

    asyncio.run(main())
    assert [type(one) for one in caught] == [expected]


def test_if_one_of_several_answers_fails_the_others_are_cancelled() -> None:
    tokens = ScriptedTokens(lambda _: ValueError("too long"), delay=lambda number: 0.0 if number == 1 else 60.0)

    async def main() -> None:
        with pytest.raises(ValueError, match="too long"):
            await episode_of(tokens).client.generate_many([1, 2], 3)
        await asyncio.sleep(0)
        assert len(tokens.cancelled) == 2

    asyncio.run(main())


# ------------------------------------------------------------------------------ what an agent can mend, or waits for


def test_tokens_that_the_engine_refuses_can_be_mended() -> None:
    wrong = "token 1000000000 is outside the vocabulary"

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        status, answer, _ = await post(f"{base_url}/completions", api_key, {"prompt": [66]})
        assert (status, answer["error"]["message"], answer["error"]["param"]) == (400, wrong, "prompt")
        return float((await post(f"{base_url}/completions", api_key, {"prompt": [65]}))[0] == 200)

    tokens = ScriptedTokens(lambda text: DataError(wrong) if text == "B" else "5")
    assert run(agent, tokens).reward == 1.0


def test_a_body_with_too_many_levels_is_a_bad_request(caplog: pytest.LogCaptureFixture) -> None:
    deep = "[" * 100_000 + "]" * 100_000

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        url, headers = f"{base_url}/chat/completions", {"Authorization": f"Bearer {api_key}"}
        bodies = [f'{{"messages": {deep}}}', json.dumps({"messages": said(tool_calls=[CALL | {"x": NESTED}])})]
        for body, status in zip(bodies, (400, 200), strict=True):
            async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
                assert answer.status == status, await answer.json()
        return 1.0

    assert run(agent).reward == 1.0
    assert not caplog.records


def test_an_agent_that_works_on_after_a_limit_is_spoken_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_agent, "REFUSED_SECONDS", 0.0)
    monkeypatch.setattr(http_agent, "WATCH_SECONDS", 0.01)
    spoken = asyncio.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            spoken.set()

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        url, body = f"{base_url}/chat/completions", {"messages": [{"role": "user", "content": "x" * 40}]}
        for _ in range(2):
            status, answer, _ = await post(url, api_key, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert not any(letter.isdigit() for letter in answer["error"]["message"])
        while not spoken.is_set():
            await asyncio.sleep(0.005)
        return 1.0

    handler = Heard()
    logging.getLogger("hybrid_rl").addHandler(handler)
    try:
        run(agent, limits=Limits(max_completion_length=20, max_length=40))
    finally:
        logging.getLogger("hybrid_rl").removeHandler(handler)
    (record,) = caplog.records
    assert "trajectory_timeout_seconds" in record.message and "the limit of max_completion_length" in record.message
