"""Trajectories with tools, environments and forks on vLLM: what is stored is what it made, whenever tools answer."""

import tempfile
from pathlib import Path

import pytest

from hybrid_rl import Trainer
from tests.random_tools import SETTINGS, TOOLS, Line, caller, gap_between, gaps, is_varied, rows
from tests.vllm.test_trainer import KEYS, SHAPE

pytestmark = pytest.mark.slow

# vLLM computes in fp32 here too, but adds up in another order, which differs with the sequences that it has together.
TOLERANCE = 1e-5


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
            keys |= {"num_ranks": num_ranks, "env_vars": {"TMPDIR": short}} if num_ranks > 1 else {}
            with Trainer(model, None, rows(num_prompts), tools=TOOLS, environment_factory=Line, **keys) as trainer:
                step = trainer.step()
                batch = step.batch if num_ranks == 1 else step.batch.load()
            batches.append(batch)
            assert is_varied(step.metrics, set(batch["finish_reason"]), 8 * num_prompts), step.metrics
            assert gaps(batch) < TOLERANCE
    assert gap_between(*batches) < TOLERANCE
