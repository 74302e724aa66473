"""`hybrid-rl report`: one HTML page about one or more runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_rl.errors import NotYetSupportedError


def write_report(runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")]) -> None:
    """Write one HTML page about one or more runs."""
    raise NotYetSupportedError("hybrid-rl report is not there yet; curves.png and metrics.jsonl are in the run folder")
