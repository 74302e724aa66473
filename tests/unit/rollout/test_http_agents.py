"""Agents that speak to the endpoint, on a real engine: what is stored is what the policy said."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import openai
import pytest
import torch

from hybrid_rl.agents.chat import Chat
from hybrid_rl.extras.endpoint.http_agent import HttpAgent
from tests.support.tiny import CHAT_TEMPLATE, build_tokenizer
from tests.unit.rollout.agents import TASKS, Rig, own_logprobs


def talker(delays_seed: int) -> Any:
    """An agent of OpenAI's client: up to three turns, the second streams or has two answers, and a completion of text.
    What it says depends on answers only, not on its delays."""
    noise = random.Random(delays_seed)

    async def agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
            ask: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 5, "temperature": 1.0}
            length = 0
            for number in range(3):
                await asyncio.sleep(noise.random() ** 4 * 0.01)
                if number == 1 and length % 2:
                    text = ""
                    async for chunk in await client.chat.completions.create(**ask, stream=True):
                        text += chunk.choices[0].delta.content or ""
                else:
                    answer = await client.chat.completions.create(**ask, n=1 + number % 2)
                    text = answer.choices[0].message.content or ""
                length += len(text)
                messages += [{"role": "assistant", "content": text or None}, {"role": "user", "content": str(length)}]
            await client.completions.create(model="m", prompt=row["prompt"], max_tokens=4)
            return float(length)

    return agent


def made_by(delays_seed: int) -> tuple[Any, Any]:
    tokenizer = build_tokenizer(chat=True)
    # Answers begin as the template renders them later on.
    tokenizer.chat_template = CHAT_TEMPLATE.replace("'/'", "'[a'")
    chat = Chat(tokenizer)
    with Rig(HttpAgent(talker(delays_seed), temperature=1.0), chat=chat) as rig:
        batch, report = rig.run()
        own = own_logprobs(rig.module, batch)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("agent ")]
    return batch, (own, report)


def test_the_stored_tokens_have_the_logprobs_of_the_trainer_whatever_the_delays() -> None:
    batch, (own, report) = made_by(0)
    again, _ = made_by(1)
    mask = batch["completion_mask"].values
    assert not report.failures
    torch.testing.assert_close(batch["rollout_logprobs"].values[mask].double(), own[mask], atol=1e-5, rtol=0)
    assert (batch["rollout_logprobs"].values[~mask] == 0).all() and (~mask).sum() > 30
    # 4 prompts, 3 generations; conversations stay whole, and each has at least the samples of its text completion.
    assert len(set(batch["trajectory"].tolist())) == 12
    assert int((batch["turn"] == 1).sum()) == 12
    assert sum(batch["rewards"].tolist()) > 0
    for name in ("completion_ids", "rollout_logprobs", "completion_mask"):
        torch.testing.assert_close(again[name].values, batch[name].values, atol=1e-5, rtol=0)
    assert again["turn"].tolist() == batch["turn"].tolist()


def test_an_agent_past_its_time_has_the_reward_of_a_limit() -> None:
    async def hangs(row: dict[str, Any], base_url: str, api_key: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    with Rig(HttpAgent(hangs, temperature=1.0), config={"trajectory_timeout_seconds": 0.1}) as rig:
        batch, report = rig.run(num_generations=1, tasks=TASKS[:2])
    assert (batch["finish_reason"], batch["rewards"].tolist(), report.failures) == (["time"] * 2, [0.0] * 2, [])


def test_an_agent_that_never_asks_the_endpoint_has_failed() -> None:
    async def elsewhere(row: dict[str, Any], base_url: str, api_key: str) -> float:
        return 0.5

    with Rig(HttpAgent(elsewhere, temperature=1.0)) as rig:
        batch, report = rig.run(num_generations=1, tasks=TASKS[:2])
    assert batch["finish_reason"] == ["error"] * 2 and batch["rewards"].isnan().all()
    assert "use the base_url and api_key" in report.failures[0].detail


def test_a_function_that_blocks_the_event_loop_of_all_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hybrid_rl.process.threads.BLOCKED_SECONDS", 0.1)
    monkeypatch.setattr("hybrid_rl.extras.endpoint.http_agent.WATCH_SECONDS", 0.02)

    async def blocks(row: dict[str, Any], base_url: str, api_key: str) -> float:
        while "event loop" not in caplog.text and time.monotonic() < latest:
            time.sleep(0.01)  # noqa: ASYNC251
        return 0.0

    latest = time.monotonic() + 20
    with Rig(HttpAgent(blocks, temperature=1.0)) as rig:
        rig.run(1, TASKS[:1])
    assert "because a call blocks their event loop" in caplog.text and "in blocks" in caplog.text
