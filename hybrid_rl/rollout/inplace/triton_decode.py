"""Paged decode attention as a Triton kernel: one query token per sequence against keys and values that lie in blocks.

The context of a sequence is cut into parts that run side by side and are joined by a second kernel (flash-decoding,
Dao et al. 2023), so that a few long sequences fill a GPU; within a part the softmax is taken online (Milakov and
Gimelshein, arXiv:1805.02867). The query heads that share a key head are the rows of one tile, so a key is read once for
all of them. Nothing here waits for the device and the grids depend on shapes only: the call can be captured in a CUDA
graph whose block tables and lengths change between replays. `paged_store` puts the newest keys and values into their
blocks, in one launch.

Importing this file imports Triton, which only its callers on CUDA need.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_HEAD_DIM = 256
MAX_ROWS = 128  # query heads of one key head
MIN_PART_TOKENS = 128  # a shorter part costs more to join than it gains
MAX_PARTS = 64
PROGRAMS_PER_PROCESSOR = 4
LOG2_E = math.log2(math.e)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
) -> Tensor:
    """Attention of the newest token of each sequence over its cached context.

    Args:
        query: float32, bfloat16 or float16 [B, H, D].
        key_cache, value_cache: [blocks, block_size, H_kv, D] and [blocks, block_size, H_kv, D_v] of the query's dtype;
            any strides but the last, which is 1. H is a multiple of H_kv: query head h reads key head h // (H / H_kv).
        block_table: int32 [B, M]; token t of sequence b lies in block block_table[b, t // block_size]. Entries behind
            the context are not read.
        context_length: int32 [B], at most M * block_size, tokens in the cache, the query's own included. Rows of length
            0 (padding of a batch of fixed size) give zeros.
        scale: factor of q k; None = 1 / sqrt(D).
        window: tokens that are seen, the own one included; None = all.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118); None = off.

    Returns:
        [B, H, D_v] of the query's dtype; sums are taken in float32.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, or an option out of its range.
    """
    _check(query, key_cache, value_cache, block_table, context_length, window, softcap)
    batch, num_heads, dim = query.shape
    num_blocks, block_size, num_key_heads, value_dim = value_cache.shape
    output = query.new_empty(batch, num_heads, value_dim)
    if batch == 0:
        return output
    num_parts = _num_parts(batch * num_key_heads, block_table.shape[1] * block_size, _num_processors(query.device))
    # With one part there is nothing to join: the first kernel writes the result itself.
    partial = output if num_parts == 1 else query.new_empty(batch, num_heads, num_parts, value_dim, dtype=torch.float32)
    weight = query.new_empty(batch, num_heads, num_parts, dtype=torch.float32)
    dim_tile, value_tile = (max(16, triton.next_power_of_2(d)) for d in (dim, value_dim))
    _attend[(batch, num_key_heads, num_parts)](
        query,
        key_cache,
        value_cache,
        block_table,
        context_length,
        partial,
        weight,
        (dim**-0.5 if scale is None else scale),
        softcap or 0.0,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        GROUP=num_heads // num_key_heads,
        ROWS=max(16, triton.next_power_of_2(num_heads // num_key_heads)),
        DIM=dim,
        DIM_TILE=dim_tile,
        VALUE_DIM=value_dim,
        VALUE_TILE=value_tile,
        NUM_PARTS=num_parts,
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        LOG2_E=LOG2_E,
        **_tile(max(dim_tile, value_tile) * query.element_size()),
    )
    if num_parts > 1:
        _join[(batch, num_heads)](
            partial,
            weight,
            output,
            VALUE_DIM=value_dim,
            VALUE_TILE=value_tile,
            NUM_PARTS=num_parts,
            PARTS_TILE=triton.next_power_of_2(num_parts),
        )
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
    Raises ValueError where shapes, dtypes or devices do not go together.
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
    _store[(batch, num_key_heads)](
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
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        DIM=dim,
        DIM_TILE=triton.next_power_of_2(dim),
        VALUE_DIM=value_dim,
        VALUE_TILE=triton.next_power_of_2(value_dim),
        num_warps=1,
    )


def _num_parts(num_tiles: int, max_tokens: int, num_processors: int) -> int:
    """Parts of a context so that num_tiles * parts programs fill the processors, none below MIN_PART_TOKENS at full
    length."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // num_tiles)
    return max(1, min(wanted, -(-max_tokens // MIN_PART_TOKENS), MAX_PARTS))


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Multiprocessors of a device. The CPU, where Triton's interpreter runs the kernels, counts as 16: small contexts
    are cut there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def _tile(row_bytes: int) -> dict[str, Any]:
    """Tokens of a tile and how it is run, by the bytes of one key: larger ones spill registers on Hopper."""
    tokens = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    return {"TOKENS": tokens, "num_warps": 4, "num_stages": 3 if row_bytes <= 256 else 2}


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
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last dim of {name} has stride {tensor.stride(-1)}; make it contiguous")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be above 0, or None")


@triton.jit
def _attend(
    query,
    key_cache,
    value_cache,
    block_table,
    context_length,
    partial,  # [B, H, NUM_PARTS, VALUE_DIM]: the softmax-weighted mean of values over one part
    weight,  # float32 [B, H, NUM_PARTS]: log2 of the sum of exp of the part's scores, -inf for an empty part
    scale,
    softcap,
    query_stride_b,
    query_stride_h,
    key_stride_block,
    key_stride_token,
    key_stride_h,
    value_stride_block,
    value_stride_token,
    value_stride_h,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    LOG2_E: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One part of the context of one sequence and one key head, for all its query heads."""
    sequence = tl.program_id(0)
    key_head = tl.program_id(1)
    part = tl.program_id(2)
    end = tl.load(context_length + sequence)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    # The length is divided, not the table: every part of a short sequence has something to do, in whole tiles.
    part_tokens = tl.cdiv(tl.cdiv(end - begin, NUM_PARTS), TOKENS) * TOKENS
    first = begin + part * part_tokens
    last = tl.minimum(first + part_tokens, end)

    row = tl.arange(0, ROWS)
    head = key_head * GROUP + row
    dim = tl.arange(0, DIM_TILE)
    value_dim = tl.arange(0, VALUE_TILE)
    q_at = query + sequence.to(tl.int64) * query_stride_b + head[:, None] * query_stride_h + dim[None, :]
    q = tl.load(q_at, mask=(row[:, None] < GROUP) & (dim[None, :] < DIM), other=0.0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        real = token < last
        block = tl.load(block_table + sequence.to(tl.int64) * table_stride + token // BLOCK_SIZE, mask=real, other=0)
        # A cache has more than 2^31 elements.
        block = block.to(tl.int64)
        place = token % BLOCK_SIZE
        k_at = key_cache + block * key_stride_block + place * key_stride_token + key_head * key_stride_h
        k = tl.load(k_at[None, :] + dim[:, None], mask=real[None, :] & (dim[:, None] < DIM), other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), which stays finite where e^2x does not.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        scores = tl.where(real[None, :], scores * LOG2_E, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - new_best)
        p = tl.exp2(scores - new_best[:, None])
        total = total * shrink + tl.sum(p, 1)
        v_at = value_cache + block * value_stride_block + place * value_stride_token + key_head * value_stride_h
        v = tl.load(
            v_at[:, None] + value_dim[None, :], mask=real[:, None] & (value_dim[None, :] < VALUE_DIM), other=0.0
        )
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = new_best

    # An empty part has a total of 0: zeros of weight -inf. Where the model has diverged the total is NaN and stays so.
    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    at = (sequence.to(tl.int64) * tl.num_programs(1) * GROUP + head) * NUM_PARTS + part
    tl.store(weight + at, best + tl.log2(total), mask=row < GROUP)
    tl.store(
        partial + at[:, None] * VALUE_DIM + value_dim[None, :],
        mixed.to(partial.dtype.element_ty),
        mask=(row[:, None] < GROUP) & (value_dim[None, :] < VALUE_DIM),
    )


@triton.jit
def _join(
    partial,
    weight,
    output,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr,
):
    """The mean of the parts of one sequence and query head, weighted by their sums of exp."""
    at = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part = tl.arange(0, PARTS_TILE)
    value_dim = tl.arange(0, VALUE_TILE)
    w = tl.load(weight + at * NUM_PARTS + part, mask=part < NUM_PARTS, other=float("-inf"))
    best = tl.max(w, 0)
    share = tl.exp2(w - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(share, 0)
    parts = tl.load(
        partial + (at * NUM_PARTS + part)[:, None] * VALUE_DIM + value_dim[None, :],
        mask=(part[:, None] < NUM_PARTS) & (value_dim[None, :] < VALUE_DIM),
        other=0.0,
    )
    mixed = tl.sum(parts * share[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(output + at * VALUE_DIM + value_dim, mixed.to(output.dtype.element_ty), mask=value_dim < VALUE_DIM)


@triton.jit
def _store(
    key,
    value,
    key_cache,
    value_cache,
    block_table,
    context_length,
    key_from_b,
    key_from_h,
    value_from_b,
    value_from_h,
    key_stride_block,
    key_stride_token,
    key_stride_h,
    value_stride_block,
    value_stride_token,
    value_stride_h,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """The newest key and value of one sequence and key head."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(context_length + sequence) - 1
    if token >= 0:
        block = tl.load(block_table + sequence * table_stride + token // BLOCK_SIZE).to(tl.int64)
        place = token % BLOCK_SIZE
        dim = tl.arange(0, DIM_TILE)
        k = tl.load(key + sequence * key_from_b + head * key_from_h + dim, mask=dim < DIM)
        k_at = key_cache + block * key_stride_block + place * key_stride_token + head * key_stride_h
        tl.store(k_at + dim, k, mask=dim < DIM)
        dim = tl.arange(0, VALUE_TILE)
        v = tl.load(value + sequence * value_from_b + head * value_from_h + dim, mask=dim < VALUE_DIM)
        v_at = value_cache + block * value_stride_block + place * value_stride_token + head * value_stride_h
        tl.store(v_at + dim, v, mask=dim < VALUE_DIM)
