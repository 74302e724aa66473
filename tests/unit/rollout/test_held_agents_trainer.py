"""Trajectories that are held between the steps of whole runs: versions of their tokens, a run that is interrupted or
resumed, environments, and endpoints of agents."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.batch.rollout_files import load_rollout
from hybrid_rl.errors import CheckpointError
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.agents.callers import SUM_CALLS, SUM_KEYS, SUM_ROWS, Sums, build_policy
from tests.support.engines.replayed import assert_learned_alike, gaps_by_version
from tests.support.tiny import spread

pytestmark = pytest.mark.slow  # the file as a whole

KEYS = {**SUM_KEYS, "log_completions": 0, "rollout.partial": True, "oversample": 3}


class CountedSums(Sums):
    """Sums that take their time now and then."""

    every: list[Sums] = []
    num_closed = 0

    def __init__(self) -> None:
        super().__init__()
        CountedSums.every.append(self)

    def _seconds(self) -> float:
        return 0.02 * ((self.number or 0) % 3 == 0) + self._late()

    def _late(self) -> float:
        return 0.0

    def close(self) -> None:
        CountedSums.num_closed += 1


class LateSums(CountedSums):
    """Sums that take another time in every run."""

    def _late(self) -> float:
        return 0.02 * random.SystemRandom().random()


@pytest.fixture
def make(tmp_path: Path) -> Any:
    CountedSums.every, CountedSums.num_closed = [], 0
    made: list[Trainer] = []

    def make(folder: str = "runs", reward_funcs: Any = spread, **keys: Any) -> Trainer:
        keys = {**KEYS, "output_dir": str(tmp_path / folder), "run_name": "run", **keys}
        if not {"rollout_func", "agent"} & {*keys}:
            keys.setdefault("environment_factory", CountedSums)
        else:
            keys["max_tool_calling_iterations"] = None
        model, tokenizer = build_policy(SUM_CALLS)
        made.append(Trainer(model, reward_funcs, SUM_ROWS, tokenizer=tokenizer, **keys))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def numbers_of(batch: Any) -> list[int]:
    groups = dict(zip(batch["group"].tolist(), (row["number"] for row in batch["row"]), strict=True))
    return list(groups.values())


def held_of(trainer: Trainer, step: int) -> list[int]:
    return [prompt.row.columns["number"] for prompt in trainer.generating.held_prompts(step).values()]


async def own_loop(rows: Any, client: Any) -> Any:
    """Ask the policy twice for each row."""

    async def one(row: Any, trajectory: Any) -> None:
        messages = list(row["prompt"])
        for _ in range(2):
            turn = await client.generate(messages, trajectory, max_tokens=20)
            messages += [turn.message, {"role": "user", "content": "go on"}]
            await asyncio.sleep(0.001)

    return await client.each(rows, one)


@pytest.mark.parametrize("kind", ["environment", "rollout_func", "agent"])
def test_every_token_has_the_version_of_the_weights_that_made_it(make: Any, kind: str) -> None:
    """Replayed through the weights of each version, by the model's own forward pass; answers were broken off, and a
    trajectory's turns are of several versions."""
    makers: dict[str, dict[str, Any]] = {"rollout_func": {"rollout_func": own_loop}, "agent": {"agent": asker}}
    trainer = make(**makers.get(kind, {}))
    weights, others, ages, num_mixed = {0: weights_of(trainer)}, [], Counter[int](), 0
    for step in range(1, KEYS["max_steps"] + 1):
        batch = trainer.step().batch
        weights[step] = weights_of(trainer)
        gap, other_gap, found = gaps_by_version(build_policy(SUM_CALLS)[0], weights, batch, step - 1)
        assert gap < 1e-5
        others.append(other_gap)
        ages.update(found)
        num_mixed += sum(len({*row.tolist()} - {-1}) > 1 for row in batch["policy_version"])
    assert num_mixed or kind == "agent"  # an endpoint's answers take their time
    assert max(others) > 1e-2 and ages[1] > 10 and max(ages) <= trainer.config.buffer.max_staleness


async def asker(row: Any, base_url: str, api_key: str) -> float:
    """Ask the endpoint twice."""

    def ask(messages: Any) -> Any:
        import urllib.request

        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 20}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())["choices"][0]["message"]

    first = await asyncio.to_thread(ask, row["prompt"])
    second = [
        *row["prompt"],
        {"role": "assistant", "content": first["content"] or ""},
        {"role": "user", "content": "?"},
    ]
    await asyncio.to_thread(ask, second)
    return row["number"] / 64


def test_nothing_is_lost_when_a_run_is_interrupted_and_resumed(make: Any, caplog: Any) -> None:
    """Every prompt is trained on once or held; environments are closed; it is said what begins again."""
    interrupts = [2]

    def reward(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step in interrupts:
            interrupts.pop()
            os.kill(os.getpid(), signal.SIGINT)
        return [float(len(ids)) for ids in completion_ids]

    trainer, used = make(reward_funcs=reward, save_steps=1), []
    while len(used) < 3 * KEYS["prompts_per_step"]:
        try:
            used += numbers_of(trainer.step().batch)
        except KeyboardInterrupt:
            continue
    assert not interrupts
    held = held_of(trainer, 3)
    assert len(held) == 3 and len({*used, *held}) == len(used) + 3
    trainer.close()
    assert CountedSums.num_closed == len(CountedSums.every)
    caplog.clear()
    resumed = make(resume="auto", max_steps=5)
    used += numbers_of(resumed.step().batch) + numbers_of(resumed.step().batch)
    lines = read_jsonl(resumed.run_folder / "metrics.jsonl")
    assert [line["buffer/restarted_trajectories"] for line in lines[-2:]] == [2 * 3, 0]
    assert caplog.text.count("are made again, from the turns that they had finished (6 now") == 1
    held = held_of(resumed, 5)
    assert len(held) == 3 and len({*used, *held}) == len(used) + 3 == 13
    resumed.close()
    assert CountedSums.num_closed == len(CountedSums.every)
    damaged = resumed.run_folder / "checkpoint-3" / "held-0000.json"
    damaged.write_text(json.dumps([{"row": 3}]))
    with pytest.raises(CheckpointError, match="is damaged"):
        make("others", resume=str(damaged.parent))


def test_a_replay_learns_from_the_order_in_which_slow_tools_answered(make: Any) -> None:
    """Tools take another time in every run, and decide which weights make a token. The record of one run is enough to
    repeat it to the bit: which groups its steps took, how old each token was, and how long the rollouts were."""
    recorded = make("recorded", environment_factory=LateSums, save_rollouts=True)
    steps = [recorded.step().batch for _ in range(KEYS["max_steps"])]
    rollouts = recorded.run_folder / "rollouts"
    for number, batch in enumerate(steps, 1):
        saved = load_rollout(rollouts, number)
        for name in ("completion_ids", "policy_version", "rollout_logprobs"):
            assert torch.equal(saved[name].values, batch[name].values)
        assert torch.equal(saved["group"], batch["group"])
    replayed = make("replayed", environment_factory=LateSums, mode="train", rollouts_path=str(rollouts))
    replayed.fit()
    lines = assert_learned_alike(recorded, replayed)
    assert lines[0]["engine/steps"] >= 1
    assert max(line["staleness/mean_age"] for line in lines) > 0
