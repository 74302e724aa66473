"""The command line: `hybrid-rl keys` and `hybrid-rl version`, and what every recipe's `main` shares."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import hybrid_rl
from hybrid_rl.config import visible_leaves
from hybrid_rl.errors import HybridRLError
from hybrid_rl.native import is_available

USAGE = """usage: hybrid-rl keys [WORD]   every configuration key with its default, or those that contain WORD
       hybrid-rl version       versions of this library and of what it stands on"""

INTERRUPTED = 130  # the shell's convention for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `hybrid-rl`; returns the exit status."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if command and command[0] == "keys" and len(command) <= 2:
        return print_keys(command[1] if len(command) == 2 else "")
    if command == ["version"]:
        versions = {"hybrid_rl": hybrid_rl.__version__, "python": platform.python_version(), "torch": torch.__version__}
        versions |= {"transformers": transformers.__version__, "compiled extension": str(is_available())}
        print("\n".join(f"{name:20}{version}" for name, version in versions.items()))
        return 0
    asked_for_help = command in (["-h"], ["--help"], ["help"])
    print(USAGE, file=sys.stdout if asked_for_help else sys.stderr)
    return 0 if asked_for_help else 2


def print_keys(word: str = "") -> int:
    """Print the configuration keys whose path or meaning contains `word`."""
    found = [leaf for leaf in visible_leaves().values() if word in leaf.path or word in leaf.doc]
    if not found:
        print(f"no key contains {word!r}; `hybrid-rl keys` lists all", file=sys.stderr)
        return 1
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for title in ("default", "meaning"):
        table.add_column(title, overflow="fold")
    for leaf in found:
        table.add_row(leaf.path, escape(str(leaf.default)), escape(leaf.doc))
    console = Console()
    # What is piped goes to grep: one line per key.
    console = console if console.is_terminal else Console(width=240)
    console.print(table)
    return 0


def run_recipe(run: Callable[[list[str]], None]) -> None:
    """Run a recipe on the `key=value` arguments of the command line and exit.

    The library's own errors are shown as one message without a traceback (status 1), Ctrl-C ends with status 130.
    """
    try:
        run(sys.argv[1:])
    except HybridRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
