"""Residents that leave memory on several ranks, over the engine that decodes from gathered shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rl import Trainer
from hybrid_rl.logging.run_folder import read_jsonl
from tests.support.tiny import build_model, build_tokenizer, spread, sums

pytestmark = pytest.mark.slow  # processes are started

KEYS = {
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "beta": 0.05,
    "num_iterations": 2,
    "max_steps": 2,
}
DIFFERS = ("timing/", "perf/", "memory/", "step_time")


def result_of(offload: list[str], folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], list[str]]:
    """Metrics, weights and completions. A checkpoint is written between two steps, which leaves the engine without
    weights, and the actor is asleep when they are needed next."""
    keys: dict[str, Any] = {**KEYS, "memory.offload": offload, "output_dir": str(folder)}
    trainer = Trainer(build_model(), spread, sums(8), tokenizer=build_tokenizer(), num_ranks=2, **keys)
    try:
        trainer.step()
        trainer.save()
        trainer.step()
        weights = load_file(trainer.save() / "model.safetensors")
        texts = [generation.completion for generation in trainer.generate(["1+2="], num_generations=2)]
    finally:
        trainer.close()
    lines = read_jsonl(trainer.run_folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(DIFFERS)} for line in lines], weights, texts


@pytest.mark.sweep
def test_gathered_weights_outlive_shards_that_sleep(tmp_path: Path, forked_ranks: None) -> None:
    still, moving = (
        result_of(offload, tmp_path / f"runs-{len(offload)}") for offload in ([], ["actor", "optimizer", "reference"])
    )
    assert moving[0] == still[0] and len(still[0]) == 2
    assert moving[2] == still[2]
    assert still[1].keys() == moving[1].keys()
    assert all(torch.equal(moving[1][name], value) for name, value in still[1].items())
