"""The configuration keys of what is held from one training step to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rl.algos.options import key


@dataclass(frozen=True)
class BufferConfig:
    """Nothing is held: every step trains on what its own weights have made. `rollout.partial` and `rollout.async_level`
    hold groups."""


@dataclass(frozen=True)
class HeldConfig(BufferConfig):
    """Groups that were begun and are not trained on in the same step: unfinished ones go on in the next."""

    oversample: int | None = key(
        None,
        "with rollout.partial, prompts that are under way beyond what a step needs: as many groups are held after it, "
        "or dropped; None = as many as prompts_per_step, or a sixteenth of it with unfinished=drop; 0 = none: the "
        "run is the synchronous one",
        minimum=0,
    )
    unfinished: Literal["hold", "drop"] = key(
        "hold",
        "with rollout.partial, what becomes of the other groups when a step has enough: they go on in the next step, "
        "or they are dropped: then no token is old, but long completions are trained on less often",
    )
    max_staleness: int | None = key(
        None,
        "policy versions that a token may lag behind the weights that train on it; a step finishes what would be older "
        "in the next one. None = async_level; with rollout.partial two more than oversample needs at least, so that "
        "long completions have time to end",
        minimum=0,
    )
    buffer_order: Literal["fifo", "freshest"] = key(
        "fifo", "which whole groups a step takes if there are more than it needs: the oldest, or the newest"
    )
