"""Keys of runs that last: restarts, and what ends a run before its last step."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rl.algos.options import key
from hybrid_rl.errors import ConfigError
from hybrid_rl.process.stopping import seconds_of


@dataclass(frozen=True, repr=False)
class LastingKeys:
    """Keys at the top of the configuration that say what a run survives."""

    max_restarts: int = key(
        0,
        "if ranks or the engine are lost, fit() makes them again from the last checkpoint, so often at most; waits of "
        "5 s, 10 s ... up to 300 s come before; needs save_steps",
        minimum=0,
    )
    save_before: float | str | None = key(
        None,
        "save a checkpoint and end with status 75 once the process is so old: seconds, or "
        "[days-]hours:minutes:seconds; the limit of the job, less what the end of a step and a checkpoint take",
        above=0,
    )
    enable_jit_checkpoint: bool = key(
        False,
        "at SIGTERM, SIGUSR1 or SIGUSR2 fit() saves a checkpoint and ends with status 75 (128 and the number of the "
        "signal if there is nothing to save); a second signal ends the process at once; hybrid-rl train and the "
        "recipes do so anyway if save_steps is set",
    )


def check_lasting(config: LastingKeys, save_steps: int | None) -> None:
    """Raise ConfigError for a deadline that is no time, and for restarts that would begin at the first step.
    save_steps: of the run."""
    if config.save_before is not None:
        try:
            seconds = seconds_of(config.save_before)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            raise ConfigError(
                f"save_before={config.save_before!r} must be the age of the process at which it saves and ends: "
                "seconds, such as 13800, or [days-]hours:minutes:seconds, such as 03:50:00"
            )
    if config.max_restarts and save_steps is None:
        raise ConfigError(
            f"max_restarts={config.max_restarts}: a restart goes on from the last checkpoint, and none is written; set "
            "save_steps to the number of training steps that may be lost"
        )
