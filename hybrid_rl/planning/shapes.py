"""Bytes of weights and optimizers, from the shapes of a model's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.planning.ledger import Share
from hybrid_rl.planning.sharded import padded_numel
from hybrid_rl.sharding.fsdp import ShardOptions


def in_units(num_bytes: int) -> str:
    """Return bytes as text: 46.1 GB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:.1f} {unit}"
    return f"{num_bytes} B"


def weights_share(tag: str, modules: Iterable[nn.Module], sharding: ShardOptions | None) -> Share:
    """Return the weights of models on a rank. sharding: None if each rank has all of them."""
    parameters = [p for module in modules for p in module.parameters()]
    if sharding is None:
        counts = Counter[torch.dtype]()
        for p in parameters:
            counts[p.dtype] += p.numel()
        words = " + ".join(f"{count:,} parameters x {dtype.itemsize} B" for dtype, count in counts.items())
        return Share(tag, sum(count * dtype.itemsize for dtype, count in counts.items()), words or "nothing")
    size, own = sharding.master_dtype.itemsize, _shard_numel(parameters, sharding)
    words = f"{sum(p.numel() for p in parameters):,} parameters x {size} B / {sharding.dp_shard} shards"
    return Share(tag, own * size, words + _padding(parameters, sharding))


def optimizer_share(tag: str, module: PreTrainedModel, sharding: ShardOptions | None) -> Share:
    """Return the masters and Adam moments of a model on a rank."""
    trained = [p for p in module.parameters() if p.requires_grad]
    counters = 4 * len(trained)  # how many steps each tensor has had
    if sharding is not None:
        words = f"{sum(p.numel() for p in trained):,} trained x 8 B (moments) / {sharding.dp_shard} shards"
        num_bytes = _shard_numel(trained, sharding) * 8 + counters
        return Share(tag, num_bytes, f"{words}{_padding(trained, sharding)} + {counters} B of counters")
    numel = sum(p.numel() for p in trained)
    each, words = (12, "12 B (masters 4, moments 8)") if has_masters(module) else (8, "8 B (moments)")
    return Share(tag, numel * each + counters, f"{numel:,} trained x {words} + {counters} B of counters")


def has_masters(module: nn.Module) -> bool:
    """Return whether the optimizer of one rank keeps fp32 masters of this model."""
    return any(p.dtype.itemsize < torch.float32.itemsize for p in module.parameters() if p.requires_grad)


def trained_numel(module: nn.Module) -> int:
    """Count the elements that are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _shard_numel(parameters: Iterable[Tensor], sharding: ShardOptions) -> int:
    return sum(padded_numel(p, sharding.dp_shard) // sharding.dp_shard for p in parameters)


def _padding(parameters: Iterable[Tensor], sharding: ShardOptions) -> str:
    found = list(parameters)
    extra = _shard_numel(found, sharding) * sharding.dp_shard - sum(p.numel() for p in found)
    return f", {extra:,} elements of padding included" if extra else ""
