"""Shards in memory that other processes of the node can map: an engine of any rank reads them where they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory import Region
from hybrid_rl.memory.region import ALIGNMENT_BYTES
from hybrid_rl.sharding import fsdp_versions
from hybrid_rl.sharding.fsdp import Shards


@torch.no_grad()
def move_to_region(shards: Shards, tag: str) -> Region:
    """Move the parameter shards of a sharded model into a region of their own; their values stay.

    To be called once they hold their values and before the first forward pass: FSDP gathers from the new memory, the
    optimizer steps in it. Raises MemoryStateError where shards are still on meta or not in host memory.
    """
    params = fsdp_versions.parameters(shards.module)
    wrong = [p for p in params if p._sharded_param_data.is_meta or p._sharded_param_data.device.type != "cpu"]
    if wrong:
        raise MemoryStateError(f"{len(wrong)} parameter shards have no host memory, e.g. {wrong[0]!r}; load them first")
    size = sum(-(-_padded(p).nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for p in params)
    region = Region(tag, capacity_bytes=max(1, size))
    for param in params:
        padded = _padded(param)
        moved = region.allocate(tuple(padded.shape), padded.dtype)
        moved.copy_(padded)
        sharded: Any = param.sharded_param
        shape, dim = sharded._local_tensor.shape, param.fsdp_placement.dim
        sharded._local_tensor = moved.narrow(dim, 0, shape[dim])
        param._sharded_param_data = moved.view(-1)
    return region


def _padded(param: Any) -> Tensor:
    """The shard with the padding that makes all ranks' equal, as FSDP gathers it."""
    padded: Tensor = param._sharded_param_data.view(param.padded_sharded_param_size)
    return padded
