"""Recipes of agents refuse what their Trainer would refuse, before their warm start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rl.errors import ConfigError
from recipes.agents import run
from recipes.agents.guessing import build_task
from recipes.record_curves import settings_file


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("warmup_steps=300", r"warmup_steps=300 is not below the \d+ optimizer steps"),
        ("num_generations=1", "num_generations=1"),
        ("memory.offload=[critic]", "this run has no critic"),
        ("attention=varlen", "it needs a CUDA device"),
    ],
)
def test_a_recipe_refuses_before_its_warm_start(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def warm_started(*_: object) -> None:
        raise AssertionError("the warm start began")

    monkeypatch.setattr(run, "warm_started", warm_started)
    with pytest.raises(ConfigError, match=message):
        run.main(
            [argument, "device=cpu", f"output_dir={tmp_path / 'runs'}"], settings_file("agent_game"), "", build_task
        )
    assert not (tmp_path / "runs").exists()
