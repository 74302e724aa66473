"""Attention of new tokens against a paged cache: a decode step, chunks of prompts, or both in one pass.

On a CPU the compiled operators do it for float32 and bfloat16, over a cache of that dtype or a rounded one. On CUDA a
Triton kernel decodes, and chunks go to a varlen kernel that reads pages (`paged_kernel.py`) if one is installed, else
to the trainer's varlen kernel, over keys gathered from their blocks. The form in PyTorch is the
oracle of all of them, and is used if none of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_rl.compat import native
from hybrid_rl.engines.inplace.host_to_device import Tables
from hybrid_rl.engines.inplace.kv_cache import LANES, PagedCache
from hybrid_rl.engines.inplace.paged_kernel import PagedKernel, Pages
from hybrid_rl.models import AttentionContext, AttentionOptions, masked_attention
from hybrid_rl.models.attention.varlen import Kernel, Segments


@dataclass(frozen=True)
class PagedBatch:
    """Which tokens of a pass belong to which sequence, and where their caches are.

    block_table: int32 [B, M] on the host, blocks of each sequence in order; num_queries: new tokens of each sequence,
    at least 1, one sequence after the other in the pass; context_lengths: tokens of each, the new ones included.
    """

    block_table: Tensor
    num_queries: Sequence[int]
    context_lengths: Sequence[int]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return all(count == 1 for count in self.num_queries)

    @property
    def longest(self) -> tuple[int, int]:
        """Most new tokens, and most tokens, of one sequence."""
        return max(self.num_queries), max(self.context_lengths)


def paged_attention(
    cache: PagedCache,
    batch: PagedBatch,
    tables: Tables,
    kernel: Kernel | None = None,
    *,
    pages: PagedKernel | None = None,
) -> AttentionContext:
    """Return the attention context of one pass, in the fastest form that runs here.

    tables: to which the form adds what it needs on the device; to be sent before the pass. kernel: varlen attention, if
    the model has it; pages: varlen attention that reads the blocks of the cache.
    """
    operator = _operator(cache)
    if operator is not None:
        return _CompiledForm(cache, batch, operator)
    if pages is not None:
        return _PagedForm(cache, batch, pages, tables)
    if batch.is_decode and decodes_in_triton(cache):
        tables.add("block_table", batch.block_table.numpy(), np.int32)
        tables.add("context_length", batch.context_lengths, np.int32)
        return TritonDecode(cache, tables)
    return _TorchForm(cache, batch, tables) if kernel is None else _VarlenForm(cache, batch, kernel, tables)


def decodes_in_triton(cache: PagedCache) -> bool:
    """Return whether the Triton kernel takes this cache."""
    return cache.device.type == "cuda" and all(
        layer.dtype in (torch.float32, torch.bfloat16) and max(layer.key_dim, layer.value_dim) <= 256
        for layer in cache.layers.values()
    )


def _operator(cache: PagedCache) -> Callable[..., Tensor] | None:
    """Return the compiled operator, if it can run on this cache."""
    dtypes = {layer.dtype for layer in cache.layers.values()}
    fits = cache.block_size % LANES == 0 and dtypes <= {torch.float32, torch.bfloat16}
    is_rounded = any(layer.is_rounded for layer in cache.layers.values())
    name = "paged_attention_int8" if is_rounded else "paged_attention"
    return native.operator(name) if fits and cache.device.type == "cpu" else None


class _CompiledForm:
    """csrc/paged_attention.cpp."""

    def __init__(self, cache: PagedCache, batch: PagedBatch, operator: Callable[..., Tensor]) -> None:
        self._cache = cache
        self._operator = operator
        starts = torch.from_numpy(_offsets(batch.num_queries))
        self._where = (batch.block_table, starts, torch.tensor(batch.context_lengths))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values in the cache, and attend over it."""
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
    """One new token per sequence, on CUDA. Nothing of its tables is known to the host, so that it can be captured. Each
    pass and each capture needs its own: the first layer of a kind plans how contexts are cut for those after it.

    tables: block_table, int32 [B, M], and context_length, int32 [B], the new token included; 0 = a row that is not
    there.
    """

    def __init__(self, cache: PagedCache, tables: Mapping[str, Tensor] | Tables) -> None:
        self._cache = cache
        self._tables = tables
        self._kernels = triton_kernels()
        self._plans: dict[tuple[int, int | None], Any] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values in the cache, and attend over it."""
        lengths = self._tables["context_length"]
        place = (*self._cache.views(layer), self._tables["block_table"], lengths)
        self._kernels.paged_store(key, value, *place)
        kind = (key.shape[1], options.window)
        if kind not in self._plans:
            self._plans[kind] = self._kernels.plan_parts(lengths, num_key_heads=kind[0], window=kind[1])
        return self._kernels.paged_decode(
            query,
            *place,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            plan=self._plans[kind],
        )


def triton_kernels() -> Any:
    """Return the module of the decode kernels; it imports Triton, which a CPU may lack."""
    from hybrid_rl.engines.inplace import triton_decode

    return triton_decode


class _Writer:
    """Stores the new tokens of a pass, and reads what is cached."""

    def __init__(self, cache: PagedCache, batch: PagedBatch, tables: Tables) -> None:
        self._cache = cache
        self._tables = tables
        self.position = _add_places(tables, "write", cache, batch, batch.num_queries)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values of a layer."""
        self._cache.write(layer, (self._tables["write_block"], self._tables["write_offset"]), key, value)


class _PagedForm:
    """Sequences of any number of new tokens through a varlen kernel that reads the blocks of the cache."""

    def __init__(self, cache: PagedCache, batch: PagedBatch, kernel: PagedKernel, tables: Tables) -> None:
        self._cache = cache
        self._kernel = kernel
        self._tables = tables
        self._writer = _Writer(cache, batch, tables)
        self._longest = batch.longest
        _add_segments(tables, batch)
        tables.add("block_table", batch.block_table.numpy(), np.int32)
        tables.add("context_length", batch.context_lengths, np.int32)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values in the cache, and attend over it."""
        self._writer.write(layer, key, value)
        keys, values = self._cache.views(layer)
        table, queries, offsets, lengths = (
            self._tables[name] for name in ("block_table", "queries", "keys", "context_length")
        )
        pages = Pages(table, queries, offsets, lengths, *self._longest)
        return self._kernel.forward(query, keys, values, pages, options)


class _VarlenForm:
    """Chunks through the trainer's varlen kernel, over the keys of each sequence gathered into a row."""

    def __init__(self, cache: PagedCache, batch: PagedBatch, kernel: Kernel, tables: Tables) -> None:
        self._cache = cache
        self._kernel = kernel
        self._tables = tables
        self._writer = _Writer(cache, batch, tables)
        self._longest = batch.longest
        _add_segments(tables, batch)
        _add_places(tables, "read", cache, batch, batch.context_lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values in the cache, and attend over it."""
        self._writer.write(layer, key, value)
        context, weighed = self._cache.read(layer, (self._tables["read_block"], self._tables["read_offset"]))
        segments = Segments(self._tables["queries"], self._tables["keys"], *self._longest, causal=True)
        return self._kernel.forward(query.to(context.dtype), context, weighed, segments, options)[0].to(query.dtype)


class _TorchForm:
    """The same in PyTorch: gathers the keys and values of every sequence."""

    def __init__(self, cache: PagedCache, batch: PagedBatch, tables: Tables) -> None:
        self._cache = cache
        self._batch = batch
        self._tables = tables
        self._writer = _Writer(cache, batch, tables)
        tables.add("position", self._writer.position)
        tables.add("block_table", batch.block_table.numpy(), np.int32)
        self._visible: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values in the cache, and attend over it."""
        self._writer.write(layer, key, value)
        if self._batch.is_decode:
            return self._decode(layer, query, options)
        parts = []
        starts = _offsets(self._batch.num_queries)
        for row, (count, length) in enumerate(zip(self._batch.num_queries, self._batch.context_lengths, strict=True)):
            num_blocks = -(-length // self._cache.block_size)
            blocks = self._tables["block_table"][row : row + 1, :num_blocks].long()
            place = torch.arange(length, device=query.device)
            visible = _visible(place, place[length - count :], options.window)
            context, weighed = (tensor[:, :, :length] for tensor in self._gather(layer, blocks))
            own = query[starts[row] : starts[row + 1]].transpose(0, 1)[None].to(context.dtype)
            parts.append(masked_attention(own, context, weighed, visible, options)[0].transpose(0, 1).to(query.dtype))
        return torch.cat(parts)

    def _decode(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        num_blocks = -(-max(self._batch.context_lengths) // self._cache.block_size)
        blocks = self._tables["block_table"][:, :num_blocks].long()
        if options.window not in self._visible:
            place = torch.arange(num_blocks * self._cache.block_size, device=query.device)
            visible = _visible(place, self._tables["position"], options.window)
            self._visible[options.window] = visible[:, None, None, :]
        num_sequences, num_heads, dim = query.shape
        context, weighed = self._gather(layer, blocks)
        # The query heads that share a key head become its rows: grouped attention without repeating keys.
        grouped = query.reshape(num_sequences, context.shape[1], num_heads // context.shape[1], dim).to(context.dtype)
        out = masked_attention(grouped, context, weighed, self._visible[options.window], options)
        return out.reshape(num_sequences, num_heads, -1).to(query.dtype)

    def _gather(self, layer: int, blocks: Tensor) -> list[Tensor]:
        """Keys and values at int64 blocks [B, n], [B, head, n * token, dim]."""
        return [tensor.flatten(1, 2).transpose(1, 2) for tensor in self._cache.read(layer, blocks)]


def _offsets(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return where the tokens of each sequence begin, and the last ones end, [B + 1]."""
    return np.concatenate(([0], np.cumsum(counts)))


def _add_segments(tables: Tables, batch: PagedBatch) -> None:
    tables.add("queries", _offsets(batch.num_queries), np.int32)
    tables.add("keys", _offsets(batch.context_lengths), np.int32)


def _add_places(
    tables: Tables, name: str, cache: PagedCache, batch: PagedBatch, counts: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Add the block and the offset in it of the last `counts` tokens of each sequence; returns their positions."""
    sequence = np.repeat(np.arange(len(counts)), counts)
    firsts = np.subtract(batch.context_lengths, counts)
    position = np.arange(len(sequence)) + np.repeat(firsts - _offsets(counts)[:-1], counts)
    tables.add(f"{name}_block", batch.block_table.numpy()[sequence, position // cache.block_size])
    tables.add(f"{name}_offset", position % cache.block_size)
    return position


def _visible(place: Tensor, position: Tensor, window: int | None) -> Tensor:
    """Return which places [L] a token at each position [Q] sees: bool [Q, L]."""
    visible = place <= position[:, None]
    return visible if window is None else visible & (position[:, None] - place < window)
