"""A policy learns when to call a tool: a tiny one from random calls in the ordinary tests, the recipes' small one in a
few steps in the sweep and to its end on request (`e2e_full`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl import Trainer
from recipes.record_curves import AGENTS, SEEDS, recorded, run_agents, settings_digest
from tests.callers import build_policy
from tests.no_pictures import draw_nothing

DOORS = ("a", "b", "c")
# What greedy answers are right before and after, and how far a run may end from the recorded one.
START, END, TOLERANCE = 0.2, 0.9, 0.08


def open_door(door: str) -> str:
    """Open a door.

    Args:
        door: which one
    """
    return f"{door} is open"


def opened_the_right_one(completions: list[list[dict[str, Any]]], wanted: list[str], **_: object) -> list[float]:
    """The right door, and no other."""
    opened = [[m["content"] for m in said if m["role"] == "tool"] for said in completions]
    return [float(doors == [f"{door} is open"]) for doors, door in zip(opened, wanted, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_random_caller_learns_to_call(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to read the prompt, to call once, and then to stop: each is right by chance in one of four or two."""
    draw_nothing(monkeypatch)
    model, tokenizer = build_policy([("open_door", {"door": door}) for door in DOORS], seed=seed)
    with torch.no_grad():  # large weights, with which a policy of this size learns faster
        model.get_input_embeddings().weight[:, 1:].normal_(std=3.0)
        for parameter in model.model.layers.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    rows = [{"prompt": [{"role": "user", "content": door}], "wanted": door} for door in DOORS]
    with Trainer(
        model,
        opened_the_right_one,
        rows,
        eval_dataset=rows,
        tokenizer=tokenizer,
        tools=[open_door],
        seed=seed,
        output_dir=str(tmp_path),
        prompts_per_step=3,
        num_generations=16,
        max_completion_length=64,
        max_prompt_length=64,
        max_tool_calling_iterations=3,
        learning_rate=1e-2,
        max_steps=25,
        log_completions=0,
    ) as trainer:
        first = trainer.step().metrics
        last = trainer.fit()
    assert first["reward"] < 0.3
    assert last["reward"] > 0.8
    assert last["eval/accuracy"] == 1.0
    assert last["agents/tool_calls_mean"] == pytest.approx(1.0, abs=0.2)


def test_recipes_were_recorded_with_their_settings() -> None:
    stale = [name for name in AGENTS if recorded(name)["settings"] != settings_digest(name)]
    assert not stale, f"python -m recipes.record_curves {' '.join(stale)}"


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_a_few_steps_improve_the_warm_start(name: str, tmp_path: Path) -> None:
    outcome = run_agents(name, SEEDS[0], tmp_path, max_steps=10, eval_steps=None)
    assert outcome.accuracy >= outcome.curve[0] + 0.2


@pytest.mark.e2e_full
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", AGENTS)
def test_learns_as_recorded(name: str, seed: int, tmp_path: Path) -> None:
    """The whole recipe ends where it ended when it was recorded."""
    outcome = run_agents(name, seed, tmp_path)
    curve = {int(step): accuracy for step, accuracy in recorded(name)["accuracy"][str(seed)].items()}
    assert sorted(outcome.curve) == sorted(curve)
    assert outcome.accuracy == pytest.approx(curve[max(curve)], abs=TOLERANCE)
    assert outcome.accuracy >= END
    assert name == "agent_game" or outcome.curve[0] < START
