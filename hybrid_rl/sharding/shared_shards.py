"""Shards in memory that other processes of the node can map: an engine of any rank reads them where they lie."""

from __future__ import annotations

import torch

from hybrid_rl.compat import fsdp as fsdp2
from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory import Region
from hybrid_rl.memory.region import capacity_for
from hybrid_rl.sharding.fsdp import Shards


@torch.no_grad()
def move_to_region(shards: Shards, tag: str) -> Region:
    """Move the parameter shards of a sharded model into a region of their own; their values stay.

    To be called once they hold their values and before the first forward pass: FSDP gathers from the new memory, the
    optimizer steps in it. Raises MemoryStateError where shards are still on meta or not in host memory.
    """
    params = fsdp2.parameters(shards.module)
    wrong = [p for p in params if fsdp2.padded_shard(p).device.type != "cpu"]
    if wrong:
        raise MemoryStateError(f"{len(wrong)} parameter shards have no host memory, e.g. {wrong[0]!r}; load them first")
    region = Region(tag, capacity_bytes=capacity_for(map(fsdp2.padded_shard, params)))
    for param in params:
        padded = fsdp2.padded_shard(param)
        fsdp2.move_shard(param, region.allocate(tuple(padded.shape), padded.dtype).copy_(padded))
    return region
