"""vLLM's build of FlashAttention, for engines that are not vLLM."""

from __future__ import annotations

from typing import Any

from hybrid_rl.engines.detached_import import import_apart
from hybrid_rl.vllm.process_state import process_kept


def functions() -> Any:
    """Return the module vllm.vllm_flash_attn. Raises ImportError if vLLM was built without these kernels, as for
    CPUs."""
    with process_kept():
        return import_apart("vllm.vllm_flash_attn")
