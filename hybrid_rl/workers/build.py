"""The model of a role on this rank: whole with one rank, sharded with more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.schema import VLLMRolloutConfig
from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.models import CausalLM
from hybrid_rl.models.load import DTYPES
from hybrid_rl.models.weights.loading import load_weights
from hybrid_rl.models.weights.recipe import ModelRecipe, build_on_meta
from hybrid_rl.models.weights.sources import BlockSource
from hybrid_rl.workers.fsdp import ShardedCausalLM, ShardOptions, device_mesh, shard
from hybrid_rl.workers.shared_shards import move_to_region


def build_model(
    model: PreTrainedModel | ModelRecipe, config: TrainerConfig, context: RankContext, *, is_trained: bool
) -> CausalLM:
    """A role's model: a module of this process as it is, or built from a recipe, each rank reading its part of the
    weights. is_trained: False freezes all parameters (a reference), and leaves out what only training wants.

    Collective. Raises ModelError or ConfigError where the model or an option cannot be used.
    """
    options = {
        "compile": config.model.torch_compile,
        "activation_offload": config.model.activation_offload and is_trained,
    }
    if isinstance(model, PreTrainedModel):
        return CausalLM(model, config.model.attention, **options)
    module = build_on_meta(model, DTYPES[config.model.dtype])
    if not is_trained:
        module.requires_grad_(False)
    if isinstance(model.source, BlockSource):
        model.source.get = context.get
    if context.num_ranks == 1:
        load_weights(module, model.source, context.device)
        model.source.close()
        return CausalLM(module, config.model.attention, **options)
    sharding = shard_options(config, context.mesh)
    shards = shard(module, device_mesh(sharding, context.device.type), sharding)
    load_weights(module, model.source, shards.device)
    if sharding.cpu_offload:
        # Shards stay in host memory; what is computed with on the device is there.
        for child in module.modules():
            child._buffers.update({n: b if b is None else b.to(context.device) for n, b in child._buffers.items()})
    model.source.close()
    if is_trained and context.device.type == "cpu" and isinstance(config.rollout, VLLMRolloutConfig):
        shards = replace(shards, region=move_to_region(shards, "actor"))  # engines of other ranks read them there
    return ShardedCausalLM(shards, config.model.attention, **options)


def shard_options(config: TrainerConfig, mesh: RankMesh) -> ShardOptions:
    """How the configuration lays a model on these ranks."""
    fsdp = config.fsdp
    return ShardOptions(
        dp_replicate=mesh.shape["dp_replicate"],
        dp_shard=mesh.shape["dp_shard"],
        param_dtype=DTYPES[config.model.dtype],
        reduce_dtype=DTYPES[fsdp.reduce_dtype],
        reshard_after_forward=fsdp.reshard_after_forward,
        cpu_offload=fsdp.cpu_offload,
        sync_every_micro_batch=fsdp.sync_every_micro_batch,
    )


@contextmanager
def generating_model(model: CausalLM) -> Iterator[CausalLM]:
    """What an engine decodes from, inside the block: the model itself, or a plain one over its gathered weights."""
    if not isinstance(model, ShardedCausalLM):
        yield model
        return
    with model.twin.bound():
        yield CausalLM(model.twin.module, model.attention.name)


def gathered_bytes(model: CausalLM) -> int:
    """Bytes of the full weights that each rank gathers for generating; 0 where the trainer's own are full."""
    if not isinstance(model, ShardedCausalLM):
        return 0
    shapes = (parameter.shape for parameter in model.twin.module.parameters())
    return sum(torch.Size(shape).numel() for shape in shapes) * model.dtype.itemsize
