"""Trajectories with tools, environments and forks on vLLM: what is stored is what it made, whenever tools answer."""

import asyncio
import random
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hybrid_rl import Trainer
from hybrid_rl.batch import BatchRef
from hybrid_rl.logging.run_folder import read_jsonl
from tests.distributed.test_rollout_ranks import WaitsForWeights
from tests.support.agents.callers import build_policy
from tests.support.agents.random_tools import SETTINGS, TOOLS, Line, caller, gap_between, gaps, is_varied, rows
from tests.support.engines.replayed import gaps_by_version
from tests.support.tiny import spread
from tests.vllm.test_trainer import KEYS, SHAPE
from tests.vllm.test_trainer_ranks import LAYOUTS
from tests.vllm.test_trainer_ranks import short_folder as short_folder

pytestmark = pytest.mark.slow

# vLLM computes in fp32 here too, but adds up in another order, which differs with the sequences that it has together.
TOLERANCE = 1e-5
NUM_STEPS = 4
APART = {  # ranks that only generate
    "apart": {"rollout_ranks": 1},
    "apart, one engine of two ranks": {"rollout_ranks": 2, "tensor_parallel_size": 2},
}


@pytest.mark.sweep
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_token_has_the_trainers_logprob_and_delays_change_nothing(num_ranks, tmp_path):
    """num_ranks: also the width of tensor parallelism."""
    batches = []
    num_prompts = 125
    with tempfile.TemporaryDirectory(prefix="t", dir=Path("/tmp")) as short:  # the path of a socket may not be long
        for max_num_seqs in (64, 8):
            model, tokenizer = caller(**SHAPE)
            keys = {name: KEYS[name] for name in KEYS if name.startswith(("engine", "rollout", "enforce", "per_"))}
            keys |= {"kv_cache_memory_bytes": 2**26, "max_num_seqs": max_num_seqs, "tensor_parallel_size": num_ranks}
            keys |= {**SETTINGS, "prompts_per_step": num_prompts, "tokenizer": tokenizer, "output_dir": str(tmp_path)}
            keys |= {"num_ranks": num_ranks, "ray.env_vars": {"TMPDIR": short}} if num_ranks > 1 else {}
            with Trainer(model, None, rows(num_prompts), tools=TOOLS, environment_factory=Line, **keys) as trainer:
                step = trainer.step()
                batch = step.batch if num_ranks == 1 else step.batch.load()
            batches.append(batch)
            assert is_varied(step.metrics, set(batch["finish_reason"]), 8 * num_prompts), step.metrics
            assert gaps(batch) < TOLERANCE
    assert gap_between(*batches) < TOLERANCE


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [*LAYOUTS, *APART])
def test_held_trajectories_have_the_versions_of_the_weights_that_made_them(layout, tmp_path, short_folder):
    """Two ranks, of one engine and of two, or such ranks beside one that trains; tools are slow now and then, and
    answers are broken off in their middle."""

    async def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: the other
        """
        await asyncio.sleep(0.2 * (random.random() < 0.3))
        return a + b

    calls = [("add", {"a": 1, "b": 2}), ("add", {"a": 20, "b": 3})]
    shape = {**SHAPE, "seed": 3}
    model, tokenizer = build_policy(calls, favour={"k": 10.0}, **shape)
    keys = {name: KEYS[name] for name in KEYS if name.startswith(("engine", "rollout", "enforce", "per_"))}
    keys |= {"kv_cache_memory_bytes": 2**24, "ray.env_vars": {"TMPDIR": str(short_folder)}}
    keys |= APART[layout] if layout in APART else {**LAYOUTS[layout], "num_ranks": 2}
    num_held, reward = (6, WaitsForWeights()) if layout in APART else (4, spread)
    keys |= {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 60, "max_prompt_length": 60}
    keys |= {"max_tool_calling_iterations": 3, "learning_rate": 1e-2, "rollout.partial": True, "oversample": 4}
    keys |= {"max_steps": NUM_STEPS, "save_steps": 1, "output_dir": str(tmp_path), "run_name": "run"}
    with Trainer(model, reward, rows(40), tools=[add], tokenizer=tokenizer, **keys) as trainer:
        batches = [trainer.step().batch for _ in range(NUM_STEPS)]
        batches = [batch.load() if isinstance(batch, BatchRef) else batch for batch in batches]
        held = trainer.generating.held_prompts(NUM_STEPS)
        lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
        most = trainer.config.buffer.max_staleness
    weights = {0: build_policy(calls, favour={"k": 10.0}, **shape)[0].state_dict()}
    for step in range(1, NUM_STEPS):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f"checkpoint-{step}")
        weights[step] = saved.state_dict()
    ages, others, num_broken = Counter[int](), [], 0
    for version, batch in enumerate(batches):
        gap, other_gap, found = gaps_by_version(build_policy(calls, **shape)[0], weights, batch, version)
        assert gap < TOLERANCE
        others.append(other_gap)
        ages.update(found)
        for made in (row.tolist() for row in batch["policy_version"]):
            # Between two answers stand the tokens of a tool, which have no version.
            num_broken += sum(-1 < one < next_one for one, next_one in pairwise(made))
    groups = [group for batch in batches for group in {*batch["group"].tolist()}]
    assert len({*groups}) == len(groups) == 2 * NUM_STEPS and not {*groups} & {*held}
    assert max(others) > 1e-2  # so weights of a neighbouring version would be noticed
    assert ages[1] > 20 and max(ages) <= most and num_broken
    assert all(line["buffer/held_groups"] == num_held and not line["buffer/restarted_trajectories"] for line in lines)
