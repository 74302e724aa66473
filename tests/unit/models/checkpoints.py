"""Models whose checkpoints differ from their modules: tied, transposed, fused, renamed, partly fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.unit.models.families import BASE, SUPPORTED, build, made

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
# name: (config class, its own settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    # Experts are stored one by one and fused in the module; five are not divisible by two or three ranks.
    "qwen3 moe": ("Qwen3MoeConfig", {**MOE, "num_experts": 5, "head_dim": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # The head is stored under another name, which transformers finds by the class.
    "gpt-neox": ("GPTNeoXConfig", {}),
    # Has a buffer that is stored, and stays fp32.
    "deepseek v3": (
        "DeepseekV3Config",
        {**MOE, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        | {"kv_lora_rank": 16, "q_lora_rank": 16},
    ),
    # Draws random numbers while it is built.
    "qwen3 next": (
        "Qwen3NextConfig",
        {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16, "head_dim": 8},
    ),
}
NAMES = [*SUPPORTED, *MODELS]


def build_stored(name: str, **changes: Any) -> PreTrainedModel:
    """A model by name, of this table or of the families. The same weights per name, all of them different numbers."""
    if name in SUPPORTED:
        return build(name, **changes)
    config_class, own = MODELS[name]
    model = made(config_class, {**BASE, **own, **changes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def everything(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All parameters and buffers, tied ones under every name."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors in the folder of a model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
