"""The configuration keys of what is held from one training step to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rl.options import key


@dataclass(frozen=True)
class BufferConfig:
    """Nothing is held: every step trains on what its own weights have made. `rollout.partial` holds groups."""


@dataclass(frozen=True)
class PartialConfig(BufferConfig):
    """Groups that a step has begun and not finished go on in the next one."""

    oversample: int | None = key(
        None,
        "prompts that are begun beyond prompts_per_step: as many groups are held after a step; None = half of "
        "prompts_per_step",
        minimum=1,
    )
    max_staleness: int = key(
        1,
        "policy versions that a token may lag behind the weights that train on it; a step finishes what would be older "
        "in the next one",
        minimum=1,
    )
    buffer_order: Literal["fifo", "freshest"] = key(
        "fifo", "which whole groups a step takes if there are more than it needs: the oldest, or the newest"
    )
