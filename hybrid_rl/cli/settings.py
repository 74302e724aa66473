"""`KEY=VALUE` arguments of commands, and their completion in a shell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Any key of the configuration; hybrid-rl keys lists them."),
]


def take(name: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `name=VALUE`, which is not a key of the configuration, off the arguments: its values, and the rest."""
    start = f"{name}="
    found = [argument.removeprefix(start) for argument in arguments if argument.startswith(start)]
    return found, [argument for argument in arguments if not argument.startswith(start)]
