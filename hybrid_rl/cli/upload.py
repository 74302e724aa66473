"""`hybrid-rl upload`: a run sent to a tracker after the fact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_rl.errors import counted


def upload_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/grpo-quickstart.")],
    tracker: Annotated[str, typer.Argument(metavar="TRACKER", help="tensorboard, wandb, trackio or mlflow.")],
    again: Annotated[bool, typer.Option("--again", help="All of it, as a new run of the tracker.")] = False,
) -> None:
    """Send a run to a tracker after the fact: what the tracker could not be given, or a run that had none.

    It goes where the run's report_to and the tracker's own environment variables say, in the same run of the
    tracker if it has begun one, from the first step that it lacks.

    Examples:
      hybrid-rl upload runs/grpo-20260801-101500 mlflow
      WANDB_PROJECT=mine hybrid-rl upload runs/grpo-20260801-101500 wandb --again
    """
    from hybrid_rl.extras.trackers.trackers import upload

    number = upload(run, tracker, again=again)
    typer.echo(f"{tracker} got {counted(number, 'step')} of {run}" if number else f"{tracker} has all of {run} already")
