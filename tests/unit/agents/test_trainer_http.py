"""Training with an agent of OpenAI's client."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from hybrid_rl import Trainer
from tests.support.agents.callers import build_policy

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ROWS = [{"prompt": [{"role": "user", "content": f"{i}+{i}?"}], "sum": 2 * i} for i in range(4)]
SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "num_generations": 4,
    "prompts_per_step": 2,
    "max_completion_length": 120,
    "max_prompt_length": 300,
    "log_completions": 0,
}
urls: list[str] = []


async def agent(row: dict[str, Any], base_url: str, api_key: str, trainer_state: Any) -> dict[str, Any]:
    """Answer calls until there is none. The reward is the number of turns."""
    urls.append(base_url)
    messages = list(row["prompt"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        turns = 0
        while turns < 3:
            turns += 1
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], temperature=1)
            message = answer.choices[0].message
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
    return {"reward": turns, "sum": row["sum"], "step": trainer_state.global_step}


def test_an_agent_over_http_is_trained(tmp_path: Path) -> None:
    model, tokenizer = build_policy([("add", {"a": 1, "b": 1})], favour={"x": 1.0})
    before = model.lm_head.weight.clone()
    with Trainer(model, None, ROWS, tokenizer=tokenizer, agent=agent, output_dir=str(tmp_path), **SETTINGS) as trainer:
        trainer.step()
        trainer.temperature = 0.5  # the endpoint of the first step is still there
        metrics = trainer.fit()
        folder = Path(trainer.run_folder)
    assert metrics["agents/forks"] == metrics["rewards/num_failed"] == metrics["agents/ended_error"] == 0
    assert metrics["agents/turns_mean"] == pytest.approx(metrics["rewards/agent/mean"]) == metrics["reward"]
    assert 0 <= metrics["agent/sum"] <= 6 and metrics["agent/step"] == 2
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    assert not (model.lm_head.weight == before).all()
    samples = [json.loads(line) for line in next(folder.rglob("samples.jsonl")).read_text().splitlines()]
    assert {sample["extra"]["step"] for sample in samples} <= {1, 2}
    assert all(sample["extra"]["sum"] in (0, 2, 4, 6) for sample in samples)
    assert len(set(urls)) == 16
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(urls[-1].split(":")[2].partition("/")[0])))
    assert not [one.name for one in threading.enumerate() if one.name.startswith("agent ")]
