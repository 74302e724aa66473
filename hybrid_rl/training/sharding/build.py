"""The model of a role on this rank: whole with one rank, sharded with more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.config import TrainerConfig
from hybrid_rl.config.lora_keys import LoraKeys
from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.errors import ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.attention.unpacked import NAME as UNPACKED
from hybrid_rl.models.grid_linear import leave_grid
from hybrid_rl.models.heads.value_head import value_model_of, value_model_on_meta
from hybrid_rl.models.lora.inject import init_adapters, inject, train_adapters
from hybrid_rl.models.lora.model_weights import weights_of
from hybrid_rl.models.lora.peft_config import critic_peft_config, peft_config_of
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, device_mesh, move_to_region, shard
from hybrid_rl.weights.plain import running
from hybrid_rl.weights.sources import ObjectSource, WeightSource


def build_model(
    model: PreTrainedModel | ModelRecipe, config: TrainerConfig, context: RankContext, *, is_trained: bool
) -> CausalLM:
    """Make the language model of a role: a module of this process as it is, or built from a recipe, each rank reading
    its part of the weights. is_trained: False freezes all parameters (a reference), and leaves out what only training
    needs.

    Collective. Raises ModelError or ConfigError if the model or an option cannot be used.
    """
    if isinstance(model, PreTrainedModel):
        module = model
    else:
        module = build_on_meta(model, DTYPES[config.model.dtype])
        if not is_trained:
            module.requires_grad_(False)
    if is_trained and config.lora.is_on:
        are_new = train_adapters(module, peft_config_of(vars(config.lora)))
        if are_new and isinstance(model, PreTrainedModel):
            init_adapters(module, config.seed)
    if not isinstance(running(module.get_output_embeddings()), nn.Linear):
        raise ModelError(
            f"{type(module).__name__} has no linear output head; only causal language models can be trained as policy"
        )
    options = call_options(config, is_trained=is_trained)
    if isinstance(model, PreTrainedModel):
        return CausalLM(module, **options)
    region = "actor" if is_trained and config.rollout.placement != "embedded" else None
    adapter = model.adapter if is_trained else None
    return filled(module, model.source, config, context, options, region=region, adapter=adapter)


def policy_on_meta(recipe: ModelRecipe, config: TrainerConfig) -> CausalLM:
    """Make the policy without weights, for what needs its class, its config and the names of its weights only."""
    module = build_on_meta(recipe, DTYPES[config.model.dtype])
    if config.lora.is_on:
        inject(module, peft_config_of(vars(config.lora)))
    return CausalLM(module, UNPACKED)


def build_critic(model: PreTrainedModel | ModelRecipe, config: TrainerConfig, context: RankContext) -> CausalLM:
    """Make a model that returns a number per token instead of logits: over a copy of a live module's backbone, without
    its adapters, or from a recipe of a language model, of a critic or of a reward model. With lora.lora_critic its
    backbone is frozen below adapters of its own, and its head is trained whole.

    Collective. Raises ModelError or ConfigError if the model or an option cannot be used.
    """
    options = call_options(config, is_trained=True) | {"exact": False}
    if isinstance(model, PreTrainedModel):
        module, source = value_model_of(model), None
        leave_grid(module)
    else:
        module, source = value_model_on_meta(model, DTYPES[config.model.dtype])
        if isinstance(model.source, ObjectSource):
            model.source.get = context.get
    if isinstance(config.lora, LoraKeys) and config.lora.lora_critic:
        inject(module, critic_peft_config(module, vars(config.lora)))
    if source is not None:
        return filled(module, source, config, context, options)
    init_adapters(module, config.seed)
    return CausalLM(module, **options)


def call_options(config: TrainerConfig, *, is_trained: bool) -> dict[str, Any]:
    """Return the options of a CausalLM of this configuration; frozen models get none that only training needs."""
    return {
        "attention": config.model.attention if config.is_packed else UNPACKED,
        "compile": config.model.torch_compile,
        "activation_offload": config.memory.keeps_on_host("activations") and is_trained,
        "float32_head": config.model.cast_lm_head_to_fp32,
        "exact": config.model.exact,
    }


def filled(
    module: PreTrainedModel,
    source: WeightSource,
    config: TrainerConfig,
    context: RankContext,
    options: dict[str, Any],
    *,
    region: str | None = None,
    adapter: WeightSource | None = None,
) -> CausalLM:
    """Load the weights of a module on meta, sharded over the ranks. region: tag of the memory that CPU shards are moved
    to, so that engines of other ranks can read them. adapter: what its adapters begin with, instead of a new draw."""
    for each in (source, adapter):
        if isinstance(each, ObjectSource):
            each.get = context.get
    if context.num_ranks == 1:
        weights_of(module).fill(source, context.device, config.seed, adapter)
        return CausalLM(module, **options)
    sharding = shard_options(config, context.mesh, context.device.type)
    shards = shard(module, device_mesh(sharding, context.device.type), sharding)
    weights_of(module).fill(source, shards.device, config.seed, adapter)
    if region is not None and context.device.type == "cpu":
        shards = replace(shards, region=move_to_region(shards, region))
    return ShardedCausalLM(shards, **options)


def shard_options(config: TrainerConfig, mesh: RankMesh, device_type: str) -> ShardOptions:
    """Return how the configuration shards a model over these ranks. device_type: what they compute on, e.g. cuda."""
    fsdp = config.fsdp
    # Unsharded and in fp32, the gradients of 7B parameters are 28 GB besides everything else that a GPU holds. In the
    # memory of a host there is room for them, and its network is slower.
    default_sync = device_type != "cpu"
    return ShardOptions(
        dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard,
        param_dtype=DTYPES[config.model.dtype],
        reduce_dtype=DTYPES[fsdp.reduce_dtype],
        reshard_after_forward=fsdp.reshard_after_forward,
        cpu_offload=config.memory.keeps_on_host("shards"),
        sync_every_micro_batch=default_sync if fsdp.sync_every_micro_batch is None else fsdp.sync_every_micro_batch,
    )


@contextmanager
def generating_model(model: CausalLM) -> Iterator[CausalLM]:
    """Yield the model that an engine decodes from: the model itself, or a plain one over its gathered weights."""
    if not isinstance(model, ShardedCausalLM):
        yield model
        return
    with model.twin.bound():
        plain = model.plain_twin()
        plain.masked_from = model.masked_from
        yield plain


def gathered_bytes(model: CausalLM) -> int:
    """Return the bytes of full weights that each rank gathers for generating; 0 if the trainer's own are full."""
    if not isinstance(model, ShardedCausalLM):
        return 0
    shapes = (parameter.shape for parameter in model.twin.module.parameters())
    return sum(torch.Size(shape).numel() for shape in shapes) * model.dtype.itemsize
