"""`hybrid-rl quickstart`: a small model learns to add, without anything to prepare."""

from __future__ import annotations

from hybrid_rl.cli.key_values import Settings


def run_quickstart(settings: Settings = None) -> None:
    """Train a small model to add two numbers: no download, no GPU, a few minutes.

    A warm start imitates a careless worker, who mostly forgets to carry; GRPO, which learns only from right or wrong,
    corrects that. In the end supervised learning goes on for the same time, for comparison.

    Examples:
      hybrid-rl quickstart
      hybrid-rl quickstart max_steps=5
      hybrid-rl quickstart algorithm=gspo seed=7
    """
    from hybrid_rl.extras.quickstart.command import SETTINGS, quickstart

    quickstart(SETTINGS, settings or [], compares=True)
