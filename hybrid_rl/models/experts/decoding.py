"""Experts of a mixture in decode passes, without a read by the host: what a CUDA graph can hold on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_rl.compat.transformers import batched_mm_experts_forward, gated

# Where torch groups products without asking the host how large the groups are, in bfloat16 (torch 2.11,
# aten/src/ATen/native/cuda/GroupedBlas.cpp). Elsewhere it reads that, and starts one product per expert.
GROUPING_CAPABILITIES = ((9, 0), (10, 0))


def groups_on_device(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch's grouped product of this dtype asks the host for nothing."""
    if device.type != "cuda":
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) in GROUPING_CAPABILITIES


def decoded_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Do what the forward method of transformers' experts does, up to rounding. hidden: [T, H]; top_k_index: int64
    [T, K]; top_k_weights: [T, K]. Returns [T, H].

    While the tokens have fewer experts than there are, the weights of each token's experts are gathered. From there on
    that would read more than all weights, so every expert computes every token, and each token takes what its experts
    made: more operations, but in decode passes reading the weights is what takes the time.
    """
    num_tokens, top_k = top_k_index.shape
    if num_tokens * top_k <= experts.num_experts:
        few: Tensor = batched_mm_experts_forward(experts, hidden, top_k_index, top_k_weights)
        return few
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    inputs = hidden.expand(experts.num_experts, *hidden.shape)
    results = _product(experts, "down_proj", gated(experts, _product(experts, first, inputs)))
    own = results[top_k_index, torch.arange(num_tokens, device=hidden.device)[:, None]]
    return (own * top_k_weights[..., None]).sum(1).to(hidden.dtype)


def _product(experts: Any, name: str, inputs: Tensor) -> Tensor:
    """Multiply [E, T, in] by every expert's matrix of a name: [E, T, out]."""
    weight = getattr(experts, name)
    out = torch.bmm(inputs.to(weight.dtype), weight if experts.is_transposed else weight.transpose(1, 2))
    return out + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else out
