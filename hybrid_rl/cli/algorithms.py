"""`hybrid-rl algorithms`: the presets of `algorithm`, and what they are made of."""

from __future__ import annotations

from rich.padding import Padding
from rich.text import Text

from hybrid_rl.cli.lazily import put_off
from hybrid_rl.cli.tables import show, table, wide_console

SECTIONS = ("advantage", "policy_loss", "kl", "correction")


def print_algorithms() -> None:
    """List the algorithms by name, with paper and the keys that each sets, and the parts to combine instead.

    A preset is a set of values and no more: what you give beside it wins. Piped output has one line per algorithm.

    Examples:
      hybrid-rl algorithms
      hybrid-rl quickstart algorithm=gspo
      hybrid-rl train config=run.yaml algorithm=dapo epsilon_high=0.3
      hybrid-rl train config=run.yaml advantage=rloo policy_loss=cispo
    """
    put_off("torch")
    from hybrid_rl.config.choices import CHOICES
    from hybrid_rl.config.presets import PRESETS

    console = wide_console()
    sets = {name: " ".join(f"{path}={value}" for path, value in p.settings.items()) for name, p in PRESETS.items()}
    if console.is_terminal:
        for name, preset in PRESETS.items():
            console.print(Text(name, style="bold cyan").append(f"  {preset.title}", style="default not bold"))
            console.print(Padding(Text(sets[name] or "(the defaults)"), (0, 0, 0, 4)))
            console.print(Padding(Text(preset.source, style="dim"), (0, 0, 0, 4)))
        console.print("\n[bold]or combine parts[/bold], as advantage=rloo policy_loss=cispo:\n")
        for section in SECTIONS:
            members = ", ".join(CHOICES[section].members)
            console.print(
                Padding(Text(section, style="bold cyan").append(f"  {members}", style="default not bold"), (0, 0, 0, 4))
            )
        return
    rows = ((name, f"{preset.title}, {preset.source}", sets[name]) for name, preset in PRESETS.items())
    show(console, table(("algorithm", "paper", "sets"), rows))
    for section in SECTIONS:
        print(f"{section}: {', '.join(CHOICES[section].members)}")
