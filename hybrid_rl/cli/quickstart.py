"""`hybrid-rl quickstart`: a model learns to add, without anything to prepare."""

from __future__ import annotations

from typing import Annotated

import typer

from hybrid_rl.cli.key_values import Settings
from hybrid_rl.errors import ConfigError

MODELS = ("small", "smollm2")


def run_quickstart(
    settings: Settings = None,
    model: Annotated[
        str, typer.Option(metavar="|".join(MODELS), help="smollm2: SmolLM2-135M-Instruct, fetched once (93 MB).")
    ] = MODELS[0],
) -> None:
    """Train a small model to add two numbers: no download, no GPU, a few minutes.

    A warm start imitates a careless worker, who mostly forgets to carry; GRPO, which learns only from right or wrong,
    corrects that. In the end supervised learning goes on for the same time, for comparison.

    With --model smollm2 it is a language model that learns sums in plain words, which takes much longer.

    Examples:
      hybrid-rl quickstart
      hybrid-rl quickstart max_steps=5
      hybrid-rl quickstart algorithm=gspo seed=7
      hybrid-rl quickstart --model smollm2
    """
    if model not in MODELS:
        raise ConfigError(f"--model {model} is not a model of the quickstart: choose {' or '.join(MODELS)}")
    if model == "smollm2":
        from hybrid_rl.extras.quickstart.smollm2 import train_smollm2

        train_smollm2(settings or [])
    else:
        from hybrid_rl.extras.quickstart.command import SETTINGS, quickstart

        quickstart(SETTINGS, settings or [], compares=True)
