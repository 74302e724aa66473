"""Paged decode attention as Triton kernels: one query token per sequence against keys and values in blocks.

The contexts of a batch are cut into parts that run side by side and are joined by another kernel (flash-decoding,
Dao et al. 2023), so that a few long sequences fill a GPU; within a part the softmax is taken online (Milakov and
Gimelshein, arXiv:1805.02867). The query heads that share a key head are the rows of one tile, so a key is read once for
all of them. `paged_store` puts the newest keys and values into their blocks, in one launch.

How contexts are cut is decided on the device in every pass, by `plan_parts`, from the lengths that the pass has: all
parts of a batch are equally long, just long enough that the device has work for every processor, and a short sequence
has one part however long its neighbours or its block table are. Grids depend on shapes only: there are as many programs
as there can be parts (one per sequence, and PROGRAMS_PER_PROCESSOR per processor beyond that), and those beyond the
parts that there are end at once. So calls can be captured in a CUDA graph whose tables and lengths change between
replays, nothing waits for the device, and no constant of a kernel follows from the batch: each is compiled once per
shape of a model's heads. A plan serves all layers of a pass that have the same window.

Importing this file imports Triton, which only its callers on CUDA need.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from hybrid_rl.engines.inplace import decode_kernels as kernels

MAX_HEAD_DIM = 256
MAX_ROWS = 128  # query heads of one key head
MIN_PART_TOKENS = 128  # a shorter part costs more to join than it gains; a multiple of every tile
MAX_PARTS = 128  # of one sequence: the join reads them all
PROGRAMS_PER_PROCESSOR = 4
LOG2_E = math.log2(math.e)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAN_TILE = 256  # sequences that the plan looks at together
_JOIN_TILE = 8  # parts that the join reads together


class Plan(NamedTuple):
    """How the contexts of a batch are cut, for one number of key heads and one window.

    parts: int32 [most parts, 3], the sequence of each part and its first and last token + 1; first: int32 [B + 1], the
    parts of sequence b are first[b] .. first[b + 1], none if it has no context.
    """

    parts: Tensor
    first: Tensor


def plan_parts(
    context_length: Tensor, *, num_key_heads: int, window: int | None = None, num_programs: int | None = None
) -> Plan:
    """Cut the contexts of a batch, in one launch and without waiting for the device.

    Args:
        context_length: int32 [B], tokens of each sequence; 0 = a row that is not there.
        num_key_heads: programs that each part becomes.
        window: tokens that are seen; None = all.
        num_programs: programs that the device is to have at least; None = PROGRAMS_PER_PROCESSOR per processor.

    Returns:
        Parts of MIN_PART_TOKENS tokens at least, of a multiple of that many, and at most MAX_PARTS per sequence.
    """
    batch = len(context_length)
    if num_programs is None:
        num_programs = PROGRAMS_PER_PROCESSOR * _num_processors(context_length.device)
    spare = max(1, num_programs // num_key_heads)
    parts = context_length.new_empty(batch + spare, 3)
    first = context_length.new_empty(batch + 1)
    if batch:
        constants, launch = _plan_constants()
        kernels.plan[(batch,)](context_length, parts, first, batch, spare, window or 0, **constants, **launch)
    return Plan(parts, first)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_length: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """Attention of the newest token of each sequence over its cached context.

    Args:
        query: float32, bfloat16 or float16 [B, H, D].
        key_cache, value_cache: [blocks, block_size, H_kv, D] and [blocks, block_size, H_kv, D_v] of the query's dtype;
            any strides but the last, which is 1. H is a multiple of H_kv: query head h reads key head h // (H / H_kv).
        block_table: int32 [B, M] of any strides; token t of sequence b is in block block_table[b, t // block_size].
            Entries after the context are not read.
        context_length: int32 [B], at most M * block_size, tokens in the cache, the query's own included. Rows of length
            0 (padding of a batch of fixed size) give zeros.
        scale: factor of q k; None = 1 / sqrt(D).
        window: tokens that are seen, the own one included; None = all.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118); None = off.
        plan: how the contexts are cut, from `plan_parts` with these lengths, key heads and this window; None = made
            here.

    Returns:
        [B, H, D_v] of the query's dtype; sums are taken in float32.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, or an option out of its range.
    """
    _check(query, key_cache, value_cache, block_table, context_length, window, softcap)
    batch, num_heads, dim = query.shape
    block_size, num_key_heads, value_dim = value_cache.shape[1:]
    output = query.new_empty(batch, num_heads, value_dim)
    if batch == 0:
        return output
    if plan is None:
        plan = plan_parts(context_length, num_key_heads=num_key_heads, window=window)
    most_parts = len(plan.parts)
    partial = query.new_empty(most_parts, num_heads, value_dim, dtype=torch.float32)
    weight = query.new_empty(most_parts, num_heads, dtype=torch.float32)
    heads = _Heads(num_heads, num_key_heads, dim, value_dim, block_size, query.element_size(), softcap is not None)
    constants, launch = _attend_constants(heads)
    kernels.attend[(most_parts, num_key_heads)](
        query,
        key_cache,
        value_cache,
        block_table,
        plan.parts,
        plan.first,
        output,
        partial,
        weight,
        batch,
        float(dim**-0.5 if scale is None else scale),
        float(softcap or 0),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *block_table.stride(),
        **constants,
        **launch,
    )
    constants, launch = _join_constants(heads)
    kernels.join[(batch, num_heads)](partial, weight, plan.first, output, **constants, **launch)
    return output


def paged_store(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_length: Tensor,
) -> None:
    """Write the key [B, H_kv, D] and value [B, H_kv, D_v] of the newest token of each sequence into the caches.

    That is token context_length - 1; rows of length 0 write nothing. The other arguments are those of `paged_decode`.
    Raises ValueError if shapes, dtypes or devices do not go together.
    """
    _check(key, key_cache, value_cache, block_table, context_length, None, None)
    batch, num_key_heads, dim = key.shape
    block_size, value_dim = value_cache.shape[1], value_cache.shape[3]
    if key_cache.shape[2] != num_key_heads or value.shape != (batch, num_key_heads, value_dim):
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} do not go with caches of {key_cache.shape[2]} heads"
        )
    if value.dtype != value_cache.dtype or value.device != key.device or value.stride(2) != 1:
        raise ValueError(
            f"value is {value.dtype} on {value.device}; give {key.dtype} on {key.device}, last dim contiguous"
        )
    if batch == 0:
        return
    constants, launch = _store_constants(
        _Heads(num_key_heads, num_key_heads, dim, value_dim, block_size, key.element_size(), False)
    )
    kernels.store[(batch, num_key_heads)](
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        context_length,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *block_table.stride(),
        **constants,
        **launch,
    )


class _Heads(NamedTuple):
    """What the constants of the kernels follow from."""

    num_heads: int
    num_key_heads: int
    dim: int
    value_dim: int
    block_size: int
    itemsize: int
    has_softcap: bool

    @property
    def tiles(self) -> dict[str, int]:
        """Dims of a head, rounded up to what a matrix product takes."""
        tiles = [max(16, triton.next_power_of_2(dim)) for dim in (self.dim, self.value_dim)]
        return {"DIM": self.dim, "DIM_TILE": tiles[0], "VALUE_DIM": self.value_dim, "VALUE_TILE": tiles[1]}


_Constants = tuple[dict[str, Any], dict[str, int]]  # of a kernel; how it is launched


def _plan_constants() -> _Constants:
    constants = {"MIN_PART": MIN_PART_TOKENS, "MOST_PARTS": MAX_PARTS, "TILE": _PLAN_TILE}
    return constants, {"num_warps": 4, "num_stages": 1}


def _attend_constants(heads: _Heads) -> _Constants:
    tiles = heads.tiles
    # Tokens of a tile by the bytes of one key: larger ones spill registers on Hopper.
    row_bytes = max(tiles["DIM_TILE"], tiles["VALUE_TILE"]) * heads.itemsize
    group = heads.num_heads // heads.num_key_heads
    constants = {
        "BLOCK_SIZE": heads.block_size,
        "GROUP": group,
        "ROWS": max(16, triton.next_power_of_2(group)),
        **tiles,
        "HAS_SOFTCAP": heads.has_softcap,
        "LOG2_E": LOG2_E,
        "TOKENS": 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16,
    }
    return constants, {"num_warps": 4, "num_stages": 3 if row_bytes <= 256 else 2}


def _join_constants(heads: _Heads) -> _Constants:
    tiles = heads.tiles
    constants = {name: tiles[name] for name in ("VALUE_DIM", "VALUE_TILE")}
    return {**constants, "MOST_PARTS": MAX_PARTS, "TILE": _JOIN_TILE}, {"num_warps": 4, "num_stages": 1}


def _store_constants(heads: _Heads) -> _Constants:
    return {"BLOCK_SIZE": heads.block_size, **heads.tiles}, {"num_warps": 1, "num_stages": 1}


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Multiprocessors of a device. The CPU, where Triton's interpreter runs the kernels, counts as 16: small contexts
    are cut there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_length: Tensor,
    window: int | None,
    softcap: float | None,
) -> None:
    tensors = {"key_cache": key_cache, "value_cache": value_cache}
    if query.dim() != 3 or query.dtype not in _DTYPES:
        raise ValueError(f"query is {query.dtype} {list(query.shape)}; give float32, bfloat16 or float16 [B, H, D]")
    batch, num_heads, dim = query.shape
    for name, cache in tensors.items():
        if cache.dim() != 4 or cache.dtype != query.dtype:
            raise ValueError(
                f"{name} is {cache.dtype} {list(cache.shape)}; give {query.dtype} [blocks, block_size, H_kv, D]"
            )
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.shape[3] != dim:
        raise ValueError(
            f"key_cache {list(key_cache.shape)}, value_cache {list(value_cache.shape)} and query {list(query.shape)} "
            "do not go together; blocks, block_size and H_kv are the same in both caches, D in query and keys"
        )
    if not 1 <= max(dim, value_cache.shape[3]) <= MAX_HEAD_DIM:
        raise ValueError(f"head dims {dim} and {value_cache.shape[3]} must be between 1 and {MAX_HEAD_DIM}")
    num_key_heads = key_cache.shape[2]
    if num_heads % num_key_heads or num_heads // num_key_heads > MAX_ROWS:
        raise ValueError(
            f"{num_heads} query heads over {num_key_heads} key heads; give a multiple, at most {MAX_ROWS} times as many"
        )
    for name, table, shape in (
        ("block_table", block_table, "[B, M]"),
        ("context_length", context_length, "[B]"),
    ):
        if table.dtype != torch.int32 or table.dim() != len(shape.split(",")) or len(table) != batch:
            raise ValueError(f"{name} is {table.dtype} {list(table.shape)}; give int32 {shape} with B = {batch}")
    everything = {"query": query, **tensors, "block_table": block_table, "context_length": context_length}
    for name, tensor in everything.items():
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}; give both on one device")
        if tensor is not block_table and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last dim of {name} has stride {tensor.stride(-1)}; make it contiguous")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be above 0, or None")
