"""`hybrid-rl replay`: a recorded step of a run, trained once more in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_rl.cli.key_values import Settings


def replay_step(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that was made with save_rollouts=true.")],
    step: Annotated[int, typer.Argument(metavar="STEP", help="The training step.")],
    settings: Settings = None,
    sample: Annotated[
        int | None, typer.Option("--sample", "-s", help="Print the tokens of this sample, by its place in the batch.")
    ] = None,
) -> None:
    """Train a recorded step of a run once more, in one process, and show what it did.

    The samples are those of the run, on however many ranks and with whatever engine it made them. Loss and gradient
    norm stand beside those of the run. Other keys, such as beta=0.1, hold for this step, not for those before it.

    Examples:
      hybrid-rl replay runs/first 12
      hybrid-rl replay runs/first 12 --sample 3
      hybrid-rl replay runs/first 12 beta=0.1 epsilon_high=0.28
    """
    from hybrid_rl.config.load import key_values
    from hybrid_rl.extras.replay.step_replay import replay

    replayed = replay(run, step, **key_values(settings or []))
    typer.echo(repr(replayed))
    if sample is not None:
        typer.echo(replayed.table(sample))
