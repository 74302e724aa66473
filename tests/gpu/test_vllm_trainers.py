"""Two Trainers over vLLM, one after the other in one process: everything that vLLM holds of a process is given back."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hybrid_rl import Trainer
from hybrid_rl.logging.run_folder import read_jsonl
from tests.gpu.device import DEVICE
from tests.support.tiny import build_model, build_tokenizer, spread, sums

if find_spec("vllm") is None:
    pytest.skip("needs vllm (constraints-cuda.txt)", allow_module_level=True)

pytestmark = pytest.mark.slow
MIB = 1 << 20
# Heads of 64 are the smallest that vLLM's kernels take.
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
KEYS = {
    "engine": "vllm",
    "engine_args.enforce_eager": True,
    "kv_cache_memory_bytes": 64 * MIB,
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "max_steps": 3,
    "handoff.verify_steps": 1,
}


def test_a_second_trainer_trains_like_the_first_and_the_memory_of_the_first_is_free(tmp_path: Path) -> None:
    used = []
    for name in ("first", "second"):
        model = build_model(dtype=torch.bfloat16, **SHAPE).to(DEVICE)
        keys = {**KEYS, "output_dir": str(tmp_path), "run_name": name}
        with Trainer(model, spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
            trainer.fit()
            lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
        assert [line["step"] for line in lines] == [1, 2, 3]
        for line in lines:
            assert line["handoff/bytes"] > 0 and line["timing/verify"] > 0
            # Weights of 8 bits through both implementations.
            assert line["sampling/sampling_logp_difference/max"] < 0.25
        del trainer, model
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            used.append(torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0])
    # Workspaces of libraries stay; what a Trainer owns would be its cache of 64 MiB and more.
    assert not used or used[1] - used[0] < 32 * MIB


def test_the_actor_waits_in_host_memory_while_vllm_generates(tmp_path: Path) -> None:
    """Every byte that the engine gets is compared with weights that have slept and woken before."""
    model = build_model(dtype=torch.bfloat16, **SHAPE).to(DEVICE)
    moving = ["actor", "optimizer", "reference"]
    keys = {**KEYS, "beta": 0.04, "num_iterations": 2, "handoff.probe_steps": 1, "output_dir": str(tmp_path)}
    keys["memory.offload"] = moving
    with Trainer(model, spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
        trainer.fit()
        lines = [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["timing/verify"] > 0 and 0 <= line["handoff/probe_gap"] < 0.25
        assert [line[f"memory/{tag}_bytes"] for tag in moving] == [0.0, 0.0, 0.0]  # after the handoff
        assert line["sampling/sampling_logp_difference/max"] < 0.25
    assert all(parameter.isfinite().all() for parameter in model.parameters())  # they are back
