"""Bytes of weights and optimizers, from the shapes of a model's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.models.lora.model_weights import weights_of
from hybrid_rl.planning.ledger import Share
from hybrid_rl.planning.sharded import padded_numel
from hybrid_rl.planning.size_text import size_text
from hybrid_rl.training.host_optimizer import STREAMED_ELEMENTS
from hybrid_rl.training.optimizer import slices
from hybrid_rl.training.sharding.fsdp import ShardOptions


def weights_share(tag: str, modules: Iterable[PreTrainedModel], sharding: ShardOptions | None) -> Share:
    """Return the weights of models on a rank. sharding: None if each rank has all of them."""
    models = list(modules)
    parameters = [p for module in models for p in module.parameters()]
    if sharding is None:
        counts = Counter[torch.dtype]()
        for p in parameters:
            counts[p.dtype] += p.numel()
        words = " + ".join(f"{count:,} parameters x {dtype.itemsize} B" for dtype, count in counts.items())
        return Share(tag, sum(count * dtype.itemsize for dtype, count in counts.items()), words or "nothing")
    masters = {id(p) for module in models for p in weights_of(module).masters()}
    kept = [(p, sharding.master_dtype.itemsize if id(p) in masters else p.itemsize) for p in parameters]
    sizes = Counter[int]()
    for p, size in kept:
        sizes[size] += p.numel()
    words = " + ".join(f"{count:,} parameters x {size} B" for size, count in sizes.items())
    num_bytes = sum(_shard_numel([p], sharding) * size for p, size in kept)
    text = f"({words})" if len(sizes) > 1 else words
    return Share(tag, num_bytes, f"{text} / {sharding.dp_shard} shards{_padding(parameters, sharding)}")


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


def host_optimizer_share(tag: str, module: PreTrainedModel) -> Share:
    """Return masters and Adam moments that live in host memory, with the two rooms that gradients and weights stream
    through (training/host_optimizer.py)."""
    trained = [p for p in module.parameters() if p.requires_grad]
    numel, itemsize = sum(p.numel() for p in trained), max(p.dtype.itemsize for p in trained)
    sizes = {str(number): p.numel() for number, p in enumerate(trained)}
    most = max(sum(sizes[name] for name in part) for part in slices(sizes, sizes.__getitem__, STREAMED_ELEMENTS))
    rooms = 2 * most * (4 + itemsize)
    words = f"{numel:,} trained x 12 B (masters 4, moments 8) + {size_text(rooms)} to stream through"
    return Share(tag, numel * 12 + 4 * len(trained) + rooms, words)


def has_masters(module: nn.Module) -> bool:
    """Return whether the optimizer of one rank keeps fp32 masters of this model."""
    return any(p.dtype.itemsize < torch.float32.itemsize for p in module.parameters() if p.requires_grad)


def shard_bytes(module: nn.Module, sharding: ShardOptions) -> int:
    """Return the bytes of the gradients of a sharded model on a rank, once they are reduced."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return _shard_numel(trained, sharding) * sharding.master_dtype.itemsize


def trained_numel(module: nn.Module) -> int:
    """Count the elements that are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _shard_numel(parameters: Iterable[Tensor], sharding: ShardOptions) -> int:
    return sum(padded_numel(p, sharding.dp_shard) // sharding.dp_shard for p in parameters)


def _padding(parameters: Iterable[Tensor], sharding: ShardOptions) -> str:
    tensors = list(parameters)
    extra = _shard_numel(tensors, sharding) * sharding.dp_shard - sum(p.numel() for p in tensors)
    return f", {extra:,} elements of padding included" if extra else ""
