"""Attention of new tokens against a paged cache: a decode step, chunks of prompts, or both in one pass.

On a CPU the compiled operator does it for float32 and bfloat16. On CUDA a Triton kernel decodes, and the trainer's
varlen kernel takes chunks, over keys gathered from their blocks. The form in PyTorch is the oracle of all of them and
stands in where none of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_rl import native
from hybrid_rl.models import AttentionContext, AttentionOptions, masked_attention
from hybrid_rl.models.varlen import Kernel, Runs
from hybrid_rl.rollout.inplace.kv_cache import LANES, PagedCache
from hybrid_rl.rollout.inplace.upload import upload


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


def paged_attention(cache: PagedCache, batch: PagedBatch, kernel: Kernel | None = None) -> AttentionContext:
    """The attention context of one pass, in the fastest form that runs here. kernel: varlen attention, where the model
    has it."""
    operator = _operator(cache)
    if operator is not None:
        return _CompiledForm(cache, batch, operator)
    if batch.is_decode and decodes_in_triton(cache):
        return TritonDecode(cache, batch.block_table, upload(batch.context_lengths, cache.device, np.int32))
    return _VarlenForm(cache, batch, kernel) if kernel is not None else _TorchForm(cache, batch)


def decodes_in_triton(cache: PagedCache) -> bool:
    """Whether the Triton kernel takes this cache."""
    return cache.device.type == "cuda" and all(
        layer.dtype in (torch.float32, torch.bfloat16) and max(layer.key_dim, layer.value_dim) <= 256
        for layer in cache.layers.values()
    )


def _operator(cache: PagedCache) -> Callable[..., Tensor] | None:
    """The compiled operator, where it can run on this cache."""
    dtypes = {layer.dtype for layer in cache.layers.values()}
    fits = cache.block_size % LANES == 0 and dtypes <= {torch.float32, torch.bfloat16}
    return native.operator("paged_attention") if fits and cache.device.type == "cpu" else None


class _CompiledForm:
    """csrc/paged_attention.cpp."""

    def __init__(self, cache: PagedCache, batch: PagedBatch, operator: Callable[..., Tensor]) -> None:
        self._cache = cache
        self._operator = operator
        starts = np.zeros(len(batch.num_queries) + 1, dtype=np.int64)
        np.cumsum(batch.num_queries, out=starts[1:])
        self._where = (batch.block_table, torch.from_numpy(starts), torch.tensor(batch.context_lengths))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext. The new keys and values are stored in the cache."""
        return self._operator(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            *self._cache.memory(layer),
            *self._where,
            query.shape[-1] ** -0.5 if options.scale is None else options.scale,
            options.window or 0,
            options.softcap or 0.0,
        )


class TritonDecode:
    """One new token per sequence, on CUDA. Reads its tensors anew in every pass, so that it can be captured.

    block_table: int32 [B, M]; context_length: int32 [B], the new token included; 0 = a row that is not there.
    """

    def __init__(self, cache: PagedCache, block_table: Tensor, context_length: Tensor) -> None:
        from hybrid_rl.rollout.inplace import triton_decode  # imports Triton, which a CPU may lack

        self._cache = cache
        self._block_table = block_table
        self._context_length = context_length
        self._kernels = triton_decode

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext. The new keys and values are stored in the cache."""
        place = (*self._cache.views(layer), self._block_table, self._context_length)
        self._kernels.paged_store(key, value, *place)
        return self._kernels.paged_decode(
            query, *place, scale=options.scale, window=options.window, softcap=options.softcap
        )


class _Writer:
    """Stores the new tokens of a pass."""

    def __init__(self, cache: PagedCache, batch: PagedBatch) -> None:
        counts = np.asarray(batch.num_queries)
        lengths = np.asarray(batch.context_lengths)
        self.starts = np.cumsum(counts) - counts
        sequence = np.repeat(np.arange(len(counts)), counts)
        self.position = np.arange(len(sequence)) - np.repeat(self.starts - (lengths - counts), counts)
        rows, columns = (upload(index, cache.device) for index in (sequence, self.position // cache.block_size))
        self._block = batch.block_table[rows, columns].long()
        self._offset = upload(self.position % cache.block_size, cache.device)

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        keys[self._block, self._offset] = key
        values[self._block, self._offset] = value


class _VarlenForm:
    """Chunks through the trainer's varlen kernel, over the keys of each sequence gathered into a row."""

    def __init__(self, cache: PagedCache, batch: PagedBatch, kernel: Kernel) -> None:
        self._cache = cache
        self._kernel = kernel
        self._writer = _Writer(cache, batch)
        lengths = np.asarray(batch.context_lengths)
        starts = np.cumsum(lengths) - lengths
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(sequence)) - np.repeat(starts, lengths)
        rows, columns = (upload(index, cache.device) for index in (sequence, position // cache.block_size))
        self._block = batch.block_table[rows, columns].long()
        self._offset = upload(position % cache.block_size, cache.device)
        self._runs = Runs.of(batch.num_queries, batch.context_lengths, cache.device, causal=True)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext. The new keys and values are stored in the cache."""
        keys, values = self._cache.views(layer)
        self._writer.write(keys, values, key, value)
        context, weighed = (memory[self._block, self._offset] for memory in (keys, values))
        return self._kernel.forward(query, context, weighed, self._runs, options)[0]


class _TorchForm:
    """The same in PyTorch: gathers the keys and values of every sequence."""

    def __init__(self, cache: PagedCache, batch: PagedBatch) -> None:
        self._cache = cache
        self._batch = batch
        self._writer = _Writer(cache, batch)
        self._position = upload(self._writer.position, cache.device)
        self._visible: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See AttentionContext. The new keys and values are stored in the cache."""
        keys, values = self._cache.views(layer)
        self._writer.write(keys, values, key, value)
        if self._batch.is_decode:
            return self._decode(query, keys, values, options)
        parts = []
        for row, (count, length) in enumerate(zip(self._batch.num_queries, self._batch.context_lengths, strict=True)):
            num_blocks = -(-length // self._cache.block_size)
            blocks = self._batch.block_table[row : row + 1, :num_blocks].long()
            place = torch.arange(length, device=query.device)
            visible = _visible(place, place[length - count :], options.window)
            start = self._writer.starts[row]
            own = query[start : start + count].transpose(0, 1)[None]
            context, weighed = (_gather(memory, blocks)[:, :, :length] for memory in (keys, values))
            parts.append(masked_attention(own, context, weighed, visible, options)[0].transpose(0, 1))
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
        context, weighed = (_gather(memory, blocks) for memory in (keys, values))
        out = masked_attention(grouped, context, weighed, self._visible[options.window], options)
        return out.reshape(num_sequences, num_heads, -1)


def _gather(memory: Tensor, blocks: Tensor) -> Tensor:
    """[block, token, head, dim] at int64 blocks [B, n]: [B, head, n * token, dim]."""
    return memory[blocks].flatten(1, 2).transpose(1, 2)


def _visible(place: Tensor, position: Tensor, window: int | None) -> Tensor:
    """Which places [L] a token at each position [Q] sees: bool [Q, L]."""
    visible = place <= position[:, None]
    return visible if window is None else visible & (position[:, None] - place < window)
