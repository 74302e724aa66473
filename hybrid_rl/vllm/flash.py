"""vLLM's build of FlashAttention, for engines that are not vLLM."""

from __future__ import annotations

from typing import Any

from hybrid_rl.engines.apart import import_apart
from hybrid_rl.vllm.environment import process_kept


def functions() -> Any:
    """Return the module vllm.vllm_flash_attn. Raises ImportError if vLLM was built without these kernels, as for
    CPUs."""
    with process_kept():
        return import_apart("vllm.vllm_flash_attn")
