"""`hybrid-rl algorithms`: the presets of `algorithm`, and what they are made of."""

from __future__ import annotations

from hybrid_rl.cli.lazily import put_off
from hybrid_rl.cli.tables import show, table, wide_console

SECTIONS = ("advantage", "policy_loss", "kl", "correction")


def print_algorithms() -> None:
    """List the algorithms by name, with paper and the keys that each sets, and the parts to combine instead.

    Examples:
      hybrid-rl algorithms
      hybrid-rl train algorithm=gspo config=run.yaml
      hybrid-rl train advantage=rloo policy_loss=cispo config=run.yaml
    """
    put_off("torch")
    from hybrid_rl.config.choices import CHOICES
    from hybrid_rl.config.presets import PRESETS

    rows = []
    for name, preset in PRESETS.items():
        settings = " ".join(f"{path}={value}" for path, value in preset.settings.items())
        rows.append((name, f"{preset.title}, {preset.source}", settings))
    console = wide_console()
    show(console, table(("algorithm", "paper", "sets"), rows))
    for section in SECTIONS:
        console.print(f"{section}: {', '.join(CHOICES[section].members)}", soft_wrap=True)
