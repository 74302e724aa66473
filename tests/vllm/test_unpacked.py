"""Models that the trainer runs unpacked over a vLLM of this process: weights handed over, and the probe agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm

from hybrid_rl import Trainer
from hybrid_rl.errors import HybridRLError
from tests.support.tiny import VOCABULARY, build_model, build_tokenizer, spread, sums
from tests.unit.models.hybrids import build_hybrid
from tests.vllm.rigs import SHAPE
from tests.vllm.test_trainer import KEYS

pytestmark = pytest.mark.slow

# vLLM chooses the size of blocks itself where states lie beside keys and values.
UNPACKED = {**{key: value for key, value in KEYS.items() if "block_size" not in key}, "attention": "unpacked"}
VERSION = "0.32."  # of vLLM, of which the refusals are true


def model_of(name: str, **changes: int):
    if name == "qwen2":
        return build_model(**SHAPE, tie_word_embeddings=False)
    return build_hybrid(name, vocab_size=len(VOCABULARY), **{**SHAPE, **changes})


# vLLM 0.25 has Mamba's kernels in Triton alone, which its build for CPUs is without.
IN_NEWEST = pytest.mark.skipif(not vllm.__version__.startswith(VERSION), reason=f"runs on CPUs since vLLM {VERSION}x")


@pytest.mark.parametrize("name", ["qwen2", pytest.param("falcon_h1", marks=IN_NEWEST)])
def test_two_steps_whose_logprobs_are_the_trainers(name: str, tmp_path: Path) -> None:
    keys = {**UNPACKED, "max_steps": 2, "output_dir": str(tmp_path)}
    with Trainer(model_of(name, head_dim=32), spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
        steps = [metrics for _, metrics in trainer.steps()]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-5 and metrics["handoff/probe_gap"] < 1e-5
        assert metrics["skipped_updates"] == 0 and metrics["grad_norm"] > 1e-3


@pytest.mark.skipif(not vllm.__version__.startswith(VERSION), reason=f"what vLLM {VERSION}x says")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lfm2", "no attribute 'conv_dim'.*expects another config.json or other weights; set rollout.engine=inplace"),
        ("gpt_oss", "vLLM refuses this model .*No Unquantized MoE backend supports the deployment configuration"),
    ],
)
def test_what_vllm_does_not_run_on_cpus_is_refused_before_training(name: str, message: str, tmp_path: Path) -> None:
    changes = {"head_dim": 32} if name == "gpt_oss" else {}
    with pytest.raises(HybridRLError, match=message):
        Trainer(
            model_of(name, **changes),
            spread,
            output_dir=str(tmp_path),
            train_dataset=sums(12),
            tokenizer=build_tokenizer(),
            **UNPACKED,
        )
