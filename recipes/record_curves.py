"""Learning curves of the recipes, recorded for tests/e2e: `python -m recipes.record_curves [NAME ...]` (default: all).

Each recipe runs to its end from the warm start of two seeds, or of three for those of agents, on one thread;
recipes/curves/NAME.json keeps the held-out accuracy at every evaluation, and a digest of the settings that gave it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from hybrid_rl.config import load_config
from hybrid_rl.config.presets import PRESETS
from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer
from hybrid_rl.extras.quickstart.run import Outcome, improve
from hybrid_rl.extras.quickstart.task import Task, build_task
from hybrid_rl.extras.quickstart.warm_start import SupervisedReport, warm_start
from recipes.agents import calculator, guessing, run

HERE = Path(__file__).resolve().parent
CURVES = HERE / "curves"
SEEDS = (42, 7)
AGENT_SEEDS = (42, 7, 1)
# Recipes with a task of their own, which have a warm start of their own too.
AGENTS = {"agent_tools": calculator.build_task, "agent_game": guessing.build_task}


@dataclass(frozen=True)
class Start:
    """The start of recipes: the task of a seed, and a warm-started model, of which each recipe gets a copy."""

    seed: int
    task: Task
    tokenizer: PreTrainedTokenizerFast
    model: Qwen2ForCausalLM
    warm: SupervisedReport

    @classmethod
    def of(cls, seed: int) -> Start:
        """Build a model and warm-start it."""
        task, tokenizer = build_task(seed), build_tokenizer()
        model = build_model(tokenizer, seed)
        return cls(seed, task, tokenizer, model, warm_start(model, tokenizer, task, seed))

    def run(self, name: str, folder: Path, **changes: Any) -> Outcome:
        """Run a recipe from here without output, with run folders under `folder`. changes: to its settings."""
        config, _ = load_config(settings_file(name), {"seed": self.seed, "output_dir": str(folder), **changes})
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return improve(copy.deepcopy(self.model), self.tokenizer, self.task, config)


def names() -> list[str]:
    """The names of all recipes of the quickstart's task, from the YAML files in this folder."""
    return sorted(path.stem for path in HERE.glob("*.yaml") if path.stem not in AGENTS)


def run_agents(name: str, seed: int, folder: Path, num_warm_steps: int | None = None, **changes: Any) -> Outcome:
    """Run a recipe of agents without output, as `Start.run` does. num_warm_steps: None = the task's."""
    task = AGENTS[name](seed)
    config, _ = load_config(settings_file(name), {"seed": seed, "output_dir": str(folder), **changes})
    model, tokenizer = run.warm_start(task, seed, num_warm_steps)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run.improve(model, tokenizer, task, config)


def settings_file(name: str) -> Path:
    """The YAML file of a recipe."""
    return HERE / f"{name}.yaml"


def settings_digest(name: str) -> str:
    """A digest that changes with a recipe's YAML file or preset; other keys and their defaults do not affect it."""
    text = settings_file(name).read_text()
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    preset = PRESETS[load_config(settings_file(name))[0].algorithm.name].settings
    said = json.dumps([sorted(filter(None, lines)), sorted((key, repr(value)) for key, value in preset.items())])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def recorded(name: str) -> dict[str, Any]:
    """Return the record of a recipe: the digest of its settings, and by seed the curve, as text -> accuracy."""
    curve: dict[str, Any] = json.loads((CURVES / f"{name}.json").read_text())
    return curve


def record(chosen: Sequence[str]) -> None:
    """Run these recipes and write their curves."""
    torch.set_num_threads(1)
    CURVES.mkdir(exist_ok=True)
    curves: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for seed in AGENT_SEEDS:
        due = [name for name in chosen if name in AGENTS or seed in SEEDS]
        start = Start.of(seed) if set(due) - AGENTS.keys() else None
        for name in due:
            began = time.process_time()
            with tempfile.TemporaryDirectory(prefix="curves-") as folder:
                if start is None or name in AGENTS:
                    outcome = run_agents(name, seed, Path(folder))
                else:
                    outcome = start.run(name, Path(folder))
            curve = {str(step): round(accuracy, 4) for step, accuracy in sorted(outcome.curve.items())}
            curves[name][str(seed)] = curve
            print(
                f"{name}, seed {seed}: {outcome.curve[0]:.3f} -> {outcome.accuracy:.3f} in {outcome.steps} steps, "
                f"{time.process_time() - began:.0f} CPU seconds",
                flush=True,
            )
            if len(curves[name]) == len(AGENT_SEEDS if name in AGENTS else SEEDS):
                said = {"settings": settings_digest(name), "accuracy": curves[name]}
                (CURVES / f"{name}.json").write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:] or [*names(), *AGENTS])
