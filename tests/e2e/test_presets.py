"""Every preset takes training steps: whether it learns, its recipe shows (test_recipes.py)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from hybrid_rl.config.presets import PRESETS
from tests.support.tiny import build_model, build_tokenizer, spread, sums

# What a run of two steps on random rewards needs besides.
CHANGES: dict[str, dict[str, Any]] = {
    "distillation": {"teacher_path": "teacher"},
    "pass_at_k": {"success_threshold": 0.5, "num_generations": 8},
    "prorl": {"reference_reset_steps": 1},
    "rejection_sampling": {"reward_threshold": 0.5},
    "vapo": {"critic_warmup_steps": 1},
}


# Wants a mixture of experts: tests/unit/training/test_rspo.py.
ELSEWHERE = {"rspo"}

# Others of the same machinery, whose gradients tests/unit/training/test_combinations.py holds against written-out ones.
ALIKE = ("grpo", "dr_grpo", "gpg", "lite_ppo", "luspo", "max_of_group", "maxrl", "opo", "rloo", "reinforce_pp_baseline")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.sweep] * (name in ALIKE)) for name in sorted(PRESETS.keys() - ELSEWHERE)],
)
def test_a_preset_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates from each batch, so that ratios, weights and whole mini-batches play their part."""
    monkeypatch.chdir(tmp_path)
    rows = sums(16)
    if name == "sft":
        rows = [{**row, "completion": row["answer"]} for row in rows]
    if name == "distillation":
        build_model(1).save_pretrained("teacher")
        build_tokenizer().save_pretrained("teacher")
    model = build_model(0)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    sizes = {"prompts_per_step": 4, "prompts_per_mini_batch": 2, "max_completion_length": 3, "max_steps": 2}
    settings = {"algorithm": name, "output_dir": str(tmp_path), "learning_rate": 1e-3, **sizes, **CHANGES.get(name, {})}
    with Trainer(model, spread, rows, tokenizer=build_tokenizer(), **settings) as trainer:
        metrics = trainer.fit()
    assert not [key for key, value in metrics.items() if not math.isfinite(value)]
    assert metrics["skipped_updates"] == 0
    assert metrics["grad_norm"] > 1e-4
    assert any(not tensor.equal(before[key]) for key, tensor in model.state_dict().items())
