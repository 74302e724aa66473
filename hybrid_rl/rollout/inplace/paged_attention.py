"""Attention of new tokens against a paged cache: a decode step, chunks of prompts, or both in one pass.

On a CPU the compiled operator does it for float32 and bfloat16; `attend_torch` is its oracle and stands in elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl import native
from hybrid_rl.models import AttentionOptions, masked_attention
from hybrid_rl.rollout.inplace.kv_cache import LANES, PagedCache


@dataclass(frozen=True)
class PagedBatch:
    """Which tokens of a pass belong to which sequence, and where their caches lie.

    block_table: int32 [B, M], blocks of each sequence in order; num_queries: new tokens of each sequence, at least 1,
    one sequence after the other in the pass; context_lengths: tokens of each, the new ones included.
    """

    block_table: Tensor
    num_queries: Sequence[int]
    context_lengths: Sequence[int]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return all(count == 1 for count in self.num_queries)


class PagedAttention:
    """The attention context of one pass."""

    def __init__(self, cache: PagedCache, batch: PagedBatch) -> None:
        self._cache = cache
        self._batch = batch
        device = batch.block_table.device
        starts = torch.zeros(len(batch.num_queries) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(batch.num_queries), 0, out=starts[1:])
        self._query_start = starts.to(device)
        self._context_length = torch.tensor(batch.context_lengths, device=device)
        self._operator = _operator(cache)
        self._oracle: _TorchForm | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext. The new keys and values are stored in the cache."""
        if self._operator is None:
            if self._oracle is None:
                self._oracle = _TorchForm(self._cache, self._batch, self._query_start, self._context_length)
            return self._oracle.attend(layer, query, key, value, options)
        keys, values = self._cache.memory(layer)
        out: Tensor = self._operator(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            keys,
            values,
            self._batch.block_table,
            self._query_start,
            self._context_length,
            query.shape[-1] ** -0.5 if options.scale is None else options.scale,
            options.window or 0,
            options.softcap or 0.0,
        )
        return out


def _operator(cache: PagedCache) -> Callable[..., Any] | None:
    """The compiled operator, where it can run on this cache."""
    dtypes = {layer.dtype for layer in cache.layers.values()}
    fits = cache.block_size % LANES == 0 and dtypes <= {torch.float32, torch.bfloat16}
    return native.operator("paged_attention") if fits and cache.device.type == "cpu" else None


class _TorchForm:
    """The same in PyTorch: gathers the keys and values of every sequence."""

    def __init__(self, cache: PagedCache, batch: PagedBatch, query_start: Tensor, context_length: Tensor) -> None:
        self._cache = cache
        self._batch = batch
        self._query_start = query_start
        self._context_length = context_length
        device = query_start.device
        counts = torch.tensor(batch.num_queries, device=device)
        num_tokens = sum(batch.num_queries)
        self._sequence = torch.arange(len(counts), device=device).repeat_interleave(counts, output_size=num_tokens)
        first = (context_length - query_start[1:])[self._sequence]
        self._position = first + torch.arange(num_tokens, device=device)
        self._block = batch.block_table[self._sequence, self._position // cache.block_size].long()
        self._offset = self._position % cache.block_size
        self._visible: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        keys, values = self._cache.views(layer)
        keys[self._block, self._offset] = key
        values[self._block, self._offset] = value
        if self._batch.is_decode:
            return self._decode(query, keys, values, options)
        parts = []
        for row, (count, length) in enumerate(
            zip(self._batch.num_queries, self._batch.context_lengths, strict=True)
        ):
            num_blocks = -(-length // self._cache.block_size)
            blocks = self._batch.block_table[row : row + 1, :num_blocks].long()
            place = torch.arange(length, device=query.device)
            visible = _visible(place, place[length - count :], options.window)
            start = sum(self._batch.num_queries[:row])
            own = query[start : start + count].transpose(0, 1)[None]
            context = (_gather(memory, blocks)[:, :, :length] for memory in (keys, values))
            parts.append(masked_attention(own, *context, visible, options)[0].transpose(0, 1))
        return torch.cat(parts)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        num_blocks = -(-max(self._batch.context_lengths) // self._cache.block_size)
        blocks = self._batch.block_table[:, :num_blocks].long()
        if options.window not in self._visible:
            place = torch.arange(num_blocks * self._cache.block_size, device=query.device)
            visible = _visible(place, self._position, options.window)
            self._visible[options.window] = visible[:, None, None, :]
        num_sequences, num_heads, dim = query.shape
        # The query heads that share a key head become its rows: grouped attention without repeating keys.
        grouped = query.reshape(num_sequences, keys.shape[2], num_heads // keys.shape[2], dim)
        context = (_gather(memory, blocks) for memory in (keys, values))
        out = masked_attention(grouped, *context, self._visible[options.window], options)
        return out.reshape(num_sequences, num_heads, -1)


def _gather(memory: Tensor, blocks: Tensor) -> Tensor:
    """[block, token, head, dim] at int64 blocks [B, n]: [B, head, n * token, dim]."""
    return memory[blocks].flatten(1, 2).transpose(1, 2)


def _visible(place: Tensor, position: Tensor, window: int | None) -> Tensor:
    """Which places [L] a token at each position [Q] sees: bool [Q, L]."""
    visible = place <= position[:, None]
    return visible if window is None else visible & (position[:, None] - place < window)
