"""`hybrid-rl data`: what the model will see of a data set."""

from __future__ import annotations

from typing import Annotated

import typer

from hybrid_rl.cli.settings import Settings
from hybrid_rl.errors import NotYetSupportedError


def show_data(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A JSONL or parquet file, or a saved dataset.")],
    settings: Settings = None,
) -> None:
    """Show what the model will see of a data set, lengths, and what would be refused."""
    raise NotYetSupportedError("hybrid-rl data is not there yet")
