"""Every family over a vLLM of this process: two steps whose logprobs are the trainer's, or a refusal that says why."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import vllm

from hybrid_rl import Trainer
from hybrid_rl.errors import HybridRLError
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.tiny import build_tokenizer, spread, sums
from tests.unit.models.families import FAMILIES, REFUSED_OVER_VLLM, VISION, build, build_vision
from tests.vllm.rigs import SHAPE
from tests.vllm.test_trainer import KEYS

# Heads of 32 dims, the smallest of vLLM's attention on CPUs, wherever a family has a size of its own.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 2},
    "gpt-bigcode": {"n_embd": 64, "n_head": 2},
    "gemma4": {"global_head_dim": 32},
    "jetmoe": {"kv_channels": 32},
}
# Two numbers of its activation are bfloat16 in vLLM, whatever the dtype of the model.
TOLERANCES = {"apertus": 0.01}
PROBE = "engine and trainer differ by .* in the logprobs of the probe prompt"
ANOTHER_CONFIG = "vLLM fails on this model .*expects another config.json"
HEAD_SIZE = "vLLM's attention on CPUs only computes 32, 64"
VERSION = "0.32."  # of vLLM, of which the following is true
REFUSALS = {
    "afmoe": ANOTHER_CONFIG,
    "cohere2": PROBE,
    "cohere2-moe": PROBE,
    "deepseek-v2": HEAD_SIZE,
    "deepseek-v3": HEAD_SIZE,
    "dots1": "this model cannot take new weights; set rollout.engine=inplace",
    "gemma3n": PROBE,
    "glm4-moe-lite": HEAD_SIZE,
    "jetmoe": "vLLM cannot run this model: its first step ended with",
    "laguna": "has 1 parameters for which the trainer has no weight",
    "llama4": "no experts whose input is weighted by the router",
    "minicpm3": HEAD_SIZE,
    "minimax-m2": ANOTHER_CONFIG,
    "phi": "creates lm_head.bias every time it loads weights",
    "phimoe": "vLLM cannot run this model: its first step ended with",
    "solar-open": "this model cannot take new weights; set rollout.engine=inplace",
    "youtu": HEAD_SIZE,
}
# Its models of vision want two packages that vLLM for CPUs comes without.
SEES = all(importlib.util.find_spec(name) for name in ("torchvision", "torchaudio"))


def settings_of(name: str) -> dict[str, Any]:
    """What is changed of a family so that vLLM can run it on CPUs."""
    own = FAMILIES[name].settings
    heads = {"head_dim": 32} if "head_dim" in own else {}
    return {**({} if "n_embd" in own else {**SHAPE, **heads}), **SIZES.get(name, {})}


def test_the_tables_agree() -> None:
    assert REFUSALS.keys() == REFUSED_OVER_VLLM.keys() <= FAMILIES.keys()


def two_steps(module: Any, folder: Path) -> list[dict[str, float]]:
    """Their records."""
    keys = {**KEYS, "max_steps": 2, "handoff.probe_tolerance": None, "output_dir": str(folder)}
    with Trainer(module, spread, sums(12), tokenizer=build_tokenizer(), **keys) as trainer:
        trainer.fit()
    return [line for line in read_jsonl(trainer.run_folder / "metrics.jsonl") if line["step"]]


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*FAMILIES, *VISION])
def test_logprobs_are_the_trainers_or_it_is_refused(name: str, tmp_path: Path) -> None:
    module = build_vision(name) if name in VISION else build(name, **settings_of(name))
    refusal = REFUSALS.get(name) or ("torchvision" if name in VISION and not SEES else None)
    if vllm.__version__.startswith(VERSION):
        outcome = pytest.raises(HybridRLError, match=refusal) if refusal else nullcontext()
    else:  # what another version refuses is its own affair, how it does so is not
        outcome = suppress(HybridRLError)
    lines = []
    with outcome:
        lines = two_steps(module, tmp_path)
        assert len(lines) == 2
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < TOLERANCES.get(name, 1e-5)
        assert line["skipped_updates"] == 0 and line["grad_norm"] > 1e-3
