"""Partial rollouts on vLLM: completions go on under newer weights, and every token has the version of those that made
it."""

from collections import Counter

import pytest
from transformers import AutoModelForCausalLM

from hybrid_rl import Trainer
from tests.support.engines.replayed import gaps_by_version
from tests.support.tiny import build_model, build_tokenizer, spread, sums
from tests.vllm.test_trainer_ranks import short_folder as short_folder

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
KEYS = {
    "engine": "vllm",
    "engine_args.enforce_eager": True,
    "rollout.engine_args.block_size": 32,
    "kv_cache_memory_bytes": 2**22,
    "engine_args.per_request_seeds": True,
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_completion_length": 40,
    "stop_token_ids": [6, 7],  # so that completions end by chance, after some 14 tokens
    "learning_rate": 2e-2,
    "max_steps": 5,
    "rollout.partial": True,
    "oversample": 2,
}


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_ranks_that_share_an_engine_break_off_together(tmp_path, short_folder):
    """Tensor parallel over two ranks, which step together until both have nothing left that runs."""
    keys = {
        **KEYS,
        "tensor_parallel_size": 2,
        "handoff.transport": "auto",
        "num_ranks": 2,
        "run_name": "run",
        "save_steps": 1,
    }
    keys |= {"ray.env_vars": {"TMPDIR": str(short_folder)}, "output_dir": str(tmp_path)}
    model, ages = build_model(**SHAPE), Counter[int]()
    with Trainer(model, spread, sums(40), tokenizer=build_tokenizer(), **keys) as trainer:
        batches = [trainer.step().batch.load() for _ in range(KEYS["max_steps"])]
    weights = {0: build_model(**SHAPE).state_dict()}
    for step in range(1, KEYS["max_steps"]):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f"checkpoint-{step}")
        weights[step] = saved.state_dict()
    for version, batch in enumerate(batches):
        gap, _, found = gaps_by_version(build_model(**SHAPE), weights, batch, version)
        assert gap < 1e-5
        ages.update(found)
    assert ages[1] > 50 and max(ages) <= trainer.config.buffer.max_staleness
