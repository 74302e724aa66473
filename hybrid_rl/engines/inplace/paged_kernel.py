"""Varlen attention that reads keys and values in their blocks, from a library if one is installed.

| library | what is called | needs |
|---|---|---|
| vLLM | `vllm.vllm_flash_attn.flash_attn_varlen_func`, FlashAttention 3 on Hopper, else 2 | blocks of 16 tokens |
| flash-attn | `flash_attn.flash_attn_varlen_func` | blocks of 256 tokens |

Both take bfloat16 and float16, heads of up to 256 elements, a multiple of 8, windows and soft-capping.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.engines.detached_import import import_apart
from hybrid_rl.engines.inplace.kv_cache import PagedCache
from hybrid_rl.errors import ConfigError
from hybrid_rl.models import AttentionOptions

LARGEST_HEAD = 256
VLLM_BLOCK = 16
FLASH_ATTN_BLOCK = 256
_logger = logging.getLogger("hybrid_rl")


@dataclass(frozen=True)
class Pages:
    """The sequences of a pass. block_table: int32 [B, M]; query_offsets, key_offsets: int32 [B + 1], new tokens and all
    tokens before each sequence; lengths: int32 [B], all tokens of each; max_queries, max_keys: of the longest."""

    block_table: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    lengths: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True)
class PagedKernel:
    """Causal attention of the last tokens of each sequence over all of its tokens.

    functions: the module flash_attn, or vllm.vllm_flash_attn. vllm_version: of FlashAttention, 2 or 3, as vLLM is asked
    for it; None for flash_attn.
    """

    functions: Any
    vllm_version: int | None = None

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, pages: Pages, options: AttentionOptions) -> Tensor:
        """query: [T, H, D], one sequence after the other; keys, values: [blocks, block_size, H_kv, D]. Returns
        [T, H, D]."""
        own = (
            {"cu_seqlens_k": pages.key_offsets}
            if self.vllm_version is None
            else {"seqused_k": pages.lengths, "fa_version": self.vllm_version}
        )
        out: Tensor = self.functions.flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            cu_seqlens_q=pages.query_offsets,
            max_seqlen_q=pages.max_queries,
            max_seqlen_k=pages.max_keys,
            block_table=pages.block_table,
            softmax_scale=query.shape[-1] ** -0.5 if options.scale is None else options.scale,
            causal=True,
            window_size=[-1, -1] if options.window is None else [options.window - 1, 0],
            softcap=options.softcap or 0.0,
            **own,
        )
        return out


def paged_kernel(cache: PagedCache, attention: str) -> PagedKernel | None:
    """Return the kernel that reads this cache; None if there is none, or the user chose another attention.

    attention: what model.attention came to. sdpa is a choice against kernels of libraries, and so stays without.
    """
    if attention not in ("varlen", "flash_attn") or not can_read(cache, VLLM_BLOCK):
        return None
    if attention == "flash_attn" and can_read(cache, FLASH_ATTN_BLOCK):
        return PagedKernel(import_module("flash_attn"))
    return _vllm_pages()


def can_read(cache: PagedCache, block_size: int) -> bool:
    """Return whether a kernel that needs blocks of a multiple of `block_size` tokens can read this cache."""
    return (
        cache.device.type == "cuda"
        and cache.block_size % block_size == 0
        and all(
            layer.dtype in (torch.bfloat16, torch.float16)
            and layer.key_dim == layer.value_dim <= LARGEST_HEAD
            and layer.key_dim % 8 == 0
            for layer in cache.layers.values()
        )
    )


def _vllm_pages() -> PagedKernel | None:
    """vLLM's kernel if vLLM is installed with one that runs here; the log says so if it is and has none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        functions: Any = import_apart("hybrid_rl.vllm.flash").functions()
    except (ConfigError, ImportError, metadata.PackageNotFoundError) as error:
        _logger.warning("prompts are computed over gathered keys: vLLM's attention cannot be imported (%s)", error)
        return None
    for version in (3, 2):
        if functions.is_fa_version_supported(version):
            return PagedKernel(functions, version)
    _logger.warning("prompts are computed over gathered keys: vLLM's attention does not run on this device")
    return None
