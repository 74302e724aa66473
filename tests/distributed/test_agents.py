"""Agents on two real ranks: the same trajectories, losses and metrics as on one, and failures that are told."""

import json
from pathlib import Path

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.batch import BatchRef
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.agents.callers import build_policy
from tests.support.agents.random_tools import SETTINGS, TOOLS, Line, caller, gap_between, gaps, is_varied, rows

pytestmark = pytest.mark.slow  # processes are started

CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}), ("lookup", {"word": "x"})]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return a + b


async def lookup(word: str) -> str:
    """Look up a word.

    Args:
        word: it.
    """
    raise KeyError(word)


def length(completions, **_):
    return [float(len(messages)) for messages in completions]


@pytest.fixture
def train(tmp_path: Path, forked_ranks):
    """A Trainer with tools on so many ranks, always of the same model."""
    made = []

    def make(num_ranks, **keys):
        model, tokenizer = build_policy(CALLS, favour={"k": 1.0})
        rows = [{"prompt": [{"role": "user", "content": f"q{number}"}]} for number in range(8)]
        settings = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 48, "learning_rate": 1e-3}
        settings |= {"max_prompt_length": 32, "max_steps": 1, "old_logprobs": "recompute", "num_ranks": num_ranks}
        settings |= {"output_dir": str(tmp_path / "runs"), "tokenizer": tokenizer, **keys}
        if not {"rollout_func", "agent"} & set(keys):
            settings |= {"tools": [add, lookup], "reward_funcs": length}
        made.append(Trainer(model, train_dataset=rows, **settings))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def test_two_ranks_make_the_trajectories_of_one(train):
    one = train(1).step()
    trainer = train(2)
    two = trainer.step()
    batch = two.batch.load() if isinstance(two.batch, BatchRef) else two.batch
    for name in ("prompt_ids", "completion_ids", "completion_mask", "policy_version"):
        assert torch.equal(batch[name].values, one.batch[name].values), name
        assert torch.equal(batch[name].offsets, one.batch[name].offsets), name
    for name in ("group", "trajectory", "turn", "rewards", "policy_length"):
        assert torch.equal(batch[name], one.batch[name]), name
    mask = batch["completion_mask"].values
    assert 0.2 < mask.double().mean() < 0.95
    gap = (batch["rollout_logprobs"].values - one.batch["rollout_logprobs"].values).abs().max()
    own = (batch["rollout_logprobs"].values - batch["old_logprobs"].values)[mask].abs().max()
    assert max(gap, own) < 1e-5
    names = ["loss", "grad_norm", "reward", "completions/mean_length", "agents/turns_mean", "agents/forks"]
    names += ["tools/call_frequency", "tools/failure_frequency", "agents/ended_length"]
    for name in names:
        assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5, abs=1e-7), name
    assert one.metrics["tools/call_frequency"] > 0.5 and one.metrics["tools/failure_frequency"] > 0.1
    lines = [read_jsonl(trainer.run_folder / f"samples-rank{rank}.jsonl") for rank in range(2)]
    assert [len(part) for part in lines] == [8, 8]
    roles = {message["role"] for part in lines for line in part for message in line["messages"]}
    assert roles == {"assistant", "tool"}
    assert json.dumps(lines)


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_of_a_thousand_trajectories_every_token_has_the_trainers_logprob(tmp_path, forked_ranks):
    """On two ranks and on one, with other delays of tools each time."""
    batches = []
    for num_ranks in (2, 1):
        model, tokenizer = caller()
        keys = {**SETTINGS, "prompts_per_step": 125, "num_ranks": num_ranks, "output_dir": str(tmp_path)}
        keys["tokenizer"] = tokenizer
        with Trainer(model, train_dataset=rows(125), tools=TOOLS, environment_factory=Line, **keys) as trainer:
            step = trainer.step()
            batches.append(step.batch.load() if isinstance(step.batch, BatchRef) else step.batch)
        assert is_varied(step.metrics, set(batches[-1]["finish_reason"]), 1000), step.metrics
        assert gaps(batches[-1]) < 1e-5
    assert gap_between(*batches) < 1e-5
