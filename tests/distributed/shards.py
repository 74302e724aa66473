"""Models sharded over the ranks of a test, and what a rank has of the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, device_mesh, shard


def gather(value: Any) -> list[Any]:
    """The objects of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def context_of(rank: int, num_ranks: int, dp_replicate: int = 1) -> RankContext:
    """The context of a rank of a mesh."""
    mesh = RankMesh(dp_replicate=dp_replicate, dp_shard=num_ranks // dp_replicate)
    return RankContext(rank=rank, mesh=mesh, gather=gather)


def sharded(
    module: Any, dtype: torch.dtype = torch.float32, attention: str = "auto", **settings: Any
) -> ShardedCausalLM:
    """Shard a module over all ranks. dtype: in which it computes; settings: others of ShardOptions."""
    options = ShardOptions(**{"dp_replicate": 1, "dp_shard": dist.get_world_size(), "param_dtype": dtype, **settings})
    return ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options), attention)
