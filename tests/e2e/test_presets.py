"""Every preset takes training steps, whether there is a recipe of it or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import Trainer
from hybrid_rl.config.presets import PRESETS
from tests.tiny import build_model, build_tokenizer, spread, sums

# What a run of two steps on random rewards needs besides.
CHANGES: dict[str, dict[str, Any]] = {
    "vapo": {"critic_warmup_steps": 1, "length_adaptive_alpha": 5.0},
    "pass_at_k": {"success_threshold": 0.5, "num_generations": 8},
    "prorl": {"reference_reset_steps": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains(name: str, tmp_path: Path) -> None:
    """Two updates from each batch, so that ratios, weights and whole mini-batches play their part."""
    rows = [{**row, "completion": row["answer"]} for row in sums(16)]
    model, changes = build_model(0), dict(CHANGES.get(name, {}))
    if name == "distillation":
        build_model(1).save_pretrained(tmp_path / "teacher")
        build_tokenizer().save_pretrained(tmp_path / "teacher")
        changes["teacher_path"] = str(tmp_path / "teacher")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    sizes = {"prompts_per_step": 4, "prompts_per_mini_batch": 2, "max_completion_length": 3, "max_steps": 2}
    settings = {"algorithm": name, "output_dir": str(tmp_path), "learning_rate": 1e-3, **sizes, **changes}
    with Trainer(model, spread, rows, tokenizer=build_tokenizer(), **settings) as trainer:
        metrics = trainer.fit()
    assert not [key for key, value in metrics.items() if not math.isfinite(value)]
    assert metrics["skipped_updates"] == 0
    assert metrics["grad_norm"] > 1e-4
    assert any(not tensor.equal(before[key]) for key, tensor in model.state_dict().items())
