"""`hybrid-rl keys`: the keys of the configuration."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from hybrid_rl.cli.lazily import put_off
from hybrid_rl.cli.tables import show, table, wide_console


def print_keys(
    word: Annotated[str, typer.Argument(metavar="WORD", help="Only keys that have this in name or description.")] = "",
) -> None:
    """List the keys of the configuration.

    Examples:
      hybrid-rl keys                  all of them, by section
      hybrid-rl keys learning_rate
      hybrid-rl keys kl | less
    """
    put_off("torch")
    from hybrid_rl.config import visible_leaves
    from hybrid_rl.config.choices import CHOICES

    leaves = visible_leaves()
    for section, choice in CHOICES.items():
        for member in choice.members:
            for path, leaf in visible_leaves({section: member}).items():
                where = f"{section}.{choice.tag}={member}" if choice.tag else f"{section}, {member}"
                leaves.setdefault(path, replace(leaf, doc=f"{where}: {leaf.doc}"))
    found = [leaf for leaf in leaves.values() if word in leaf.path or word in leaf.doc]
    if not found:
        print(f"no key contains {word!r}; `hybrid-rl keys` lists all", file=sys.stderr)
        raise typer.Exit(1)
    made = table(("key", "default", "meaning"), ((leaf.path, str(leaf.default), leaf.doc) for leaf in found))
    made.columns[0].no_wrap = True
    show(wide_console(), made)
