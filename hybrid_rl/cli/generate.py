"""`hybrid-rl generate`: completions of a checkpoint, or a chat with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_rl.cli.settings import Settings
from hybrid_rl.errors import NotYetSupportedError


def generate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint, or any model's folder or name.")],
    settings: Settings = None,
) -> None:
    """Chat with a checkpoint, or let it complete prompts."""
    raise NotYetSupportedError("hybrid-rl generate is not there yet; call Trainer(folder, ...).generate(...)")
