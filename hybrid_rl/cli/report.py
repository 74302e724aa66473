"""`hybrid-rl report`: one HTML page about one or more runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_rl.extras.report import write_report as write


def write_report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, such as runs/grpo-quickstart.")],
    to: Annotated[
        str | None,  # as a Path, an empty one would be the current folder
        typer.Option("--to", "-o", help="The file. Default: report.html in the run's folder, of several runs here."),
    ] = None,
) -> None:
    """Write one HTML page about one or more runs.

    It shows rewards and evaluations, how well engine and trainer agree, where time and memory went, and the samples
    themselves, token by token. The page needs no network and no other file; runs may still be under way.

    Examples:
      hybrid-rl report runs/first
      hybrid-rl report runs/grpo runs/rloo --to both.html
    """
    path = write(runs, to)
    typer.echo(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
