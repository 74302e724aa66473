"""Tiny random models that cannot be packed, of the families that run through their own forward (rollout.engine=hf)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.unit.models.families import BASE, LATENT, made

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}

# name: (config class, its own settings), as in families.py. Chunks are shorter than the sequences of the tests where
# the length of a chunk is an option.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**LINEAR, **SHARED_EXPERT, "head_dim": 16}),
    "qwen3_5": ("Qwen3_5TextConfig", {**LINEAR, "head_dim": 16}),
    "lfm2": ("Lfm2Config", CONVOLUTION),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        MAMBA
        | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 16, "logits_scaling": 4.0},
    ),
    "falcon_h1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
}
# More of the same kinds, one layer or one detail apart.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**LINEAR, **SHARED_EXPERT, "head_dim": 16}),
    "lfm2_moe": ("Lfm2MoeConfig", {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1}),
    "kimi_linear": (
        "KimiLinearConfig",
        LATENT
        | {"layer_types": LINEAR["layer_types"], "linear_head_dim": 8, "linear_num_heads": 4, "q_lora_rank": None}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", LINEAR),
    "jamba": (
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "zamba2": (
        "Zamba2Config",
        {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "layers_block_type": ["mamba", "hybrid"]}
        | {"num_mem_blocks": 1, "use_mem_rope": True, "adapter_rank": 4},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16}
        | {"ssm_state_size": 8, "n_groups": 1, "head_dim": 8},
    ),
    "mamba": ("MambaConfig", {"state_size": 4}),
    "mamba2": (
        "Mamba2Config",
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 4},
    ),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 4}),
    # Attention that packing does not have: sinks, a position in the mask, a mask of its own, code of its own.
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8}),
    "bloom": ("BloomConfig", {"n_head": 4}),
    "doge": ("DogeConfig", {}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
}
# Refused by the engine: no cache of transformers, or rows of it that cannot be chosen.
NOT_CACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32, "context_length": 64}),
    "minimax": (
        "MiniMaxConfig",
        {"layer_types": LINEAR["layer_types"], "num_local_experts": 2, "head_dim": 8, "block_size": 4},
    ),
}


def build_hybrid(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model with weights large enough that every part of it shows in the logits. The same weights per name."""
    config_class, own = {**HYBRIDS, **MORE, **NOT_CACHED}[name]
    return made(config_class, {**BASE, **own, **changes}, dtype=dtype)
