"""The configuration keys of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rl.algos.options import key


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints that save_steps asks for."""

    save_total_limit: int | None = key(
        None,
        "keep only so many checkpoints of save_steps, the newest, with that which the run resumed from and the best; "
        "None = all",
        minimum=1,
    )
    async_save: bool = key(
        True,
        "write the checkpoints of save_steps while training goes on, from a copy in host memory; if that does not fit "
        "there, training waits for the disk",
    )
