"""What the workers keep in memory, as residents of the lease machine."""

from __future__ import annotations

from torch import nn

from hybrid_rl.memory import Resident
from hybrid_rl.rollout.base import KV_CACHE, WEIGHTS
from hybrid_rl.rollout.inplace import InPlaceEngine
from hybrid_rl.workers.optimizer import Optimizer

ACTOR = "actor"
OPTIMIZER = "optimizer"
REFERENCE = "reference"


def module_resident(tag: str, module: nn.Module) -> Resident:
    """Weights that stay: with one rank in host memory there is no other place for them to go."""
    return Resident(tag, lambda: sum(p.numel() * p.element_size() for p in module.parameters()))


def optimizer_resident(optimizer: Optimizer) -> Resident:
    """Masters and Adam moments; they stay, as above."""
    return Resident(OPTIMIZER, lambda: optimizer.num_bytes)


def kv_cache_resident(engine: InPlaceEngine) -> Resident:
    """The in-place engine's cache: given back while the actor trains, its content is lost."""
    return Resident(
        KV_CACHE,
        lambda: engine.kv_cache_bytes,
        policy="discard",
        sleep=lambda: engine.sleep({KV_CACHE}),
        wake=lambda: engine.wake({WEIGHTS, KV_CACHE}),
    )
