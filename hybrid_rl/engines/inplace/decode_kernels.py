"""The Triton kernels of paged decode attention; `engines/inplace/triton_decode.py` launches them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch", "spare", "window"])
def plan(
    context_length,
    parts,  # int32 [batch + spare, 3]
    first,  # int32 [batch + 1]
    batch,
    spare,
    window,
    MIN_PART: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Plan the parts of one sequence. Each program looks at all lengths: there are few, and no program waits for
    another."""
    mine = tl.program_id(0)
    row = tl.arange(0, TILE)
    total = 0
    longest = 0
    for start in range(0, batch, TILE):
        length = tl.load(context_length + start + row, mask=start + row < batch, other=0)
        length = tl.where(window > 0, tl.minimum(length, window), length)
        total += tl.sum(length, 0)
        longest = tl.maximum(longest, tl.max(length, 0))
    # With parts this long there are at most `spare` besides the one that each sequence has.
    size = tl.maximum(tl.cdiv(total, spare), tl.cdiv(longest, MOST_PARTS))
    size = tl.maximum(tl.cdiv(size, MIN_PART), 1) * MIN_PART
    before = 0
    for start in range(0, mine, TILE):
        length = tl.load(context_length + start + row, mask=start + row < mine, other=0)
        length = tl.where(window > 0, tl.minimum(length, window), length)
        before += tl.sum(tl.cdiv(length, size), 0)
    end = tl.load(context_length + mine)
    begin = tl.where(window > 0, tl.maximum(end - window, 0), 0)
    count = tl.cdiv(end - begin, size)
    tl.store(first + mine, before)
    if mine == batch - 1:
        tl.store(first + batch, before + count)
    for part in range(count):
        at = parts + (before + part) * 3
        tl.store(at, mine)
        tl.store(at + 1, begin + part * size)
        tl.store(at + 2, tl.minimum(begin + (part + 1) * size, end))


@triton.jit(do_not_specialize=["batch"])
def attend(
    query,
    key_cache,
    value_cache,
    block_table,
    parts,
    first,
    output,  # [B, H, VALUE_DIM]
    partial,  # float32 [parts, H, VALUE_DIM]: the softmax-weighted mean of values over one part
    weight,  # float32 [parts, H]: log2 of the sum of exp of the part's scores
    batch,
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
    table_stride_b,
    table_stride_block,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    LOG2_E: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute one part of the context of one sequence and one key head, for all its query heads."""
    part = tl.program_id(0)
    key_head = tl.program_id(1)
    if part < tl.load(first + batch):
        sequence = tl.load(parts + part * 3).to(tl.int64)
        begin = tl.load(parts + part * 3 + 1)
        end = tl.load(parts + part * 3 + 2)
        num_heads = tl.num_programs(1) * GROUP

        row = tl.arange(0, ROWS)
        head = key_head * GROUP + row
        dim = tl.arange(0, DIM_TILE)
        value_dim = tl.arange(0, VALUE_TILE)
        q_at = query + sequence * query_stride_b + head[:, None] * query_stride_h + dim[None, :]
        q = tl.load(q_at, mask=(row[:, None] < GROUP) & (dim[None, :] < DIM), other=0.0)

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, VALUE_TILE], tl.float32)
        for start in range(begin, end, TOKENS):
            token = start + tl.arange(0, TOKENS)
            real = token < end
            entry = block_table + sequence * table_stride_b + (token // BLOCK_SIZE) * table_stride_block
            # A cache has more than 2^31 elements.
            block = tl.load(entry, mask=real, other=0).to(tl.int64)
            place = token % BLOCK_SIZE
            k_at = key_cache + block * key_stride_block + place * key_stride_token + key_head * key_stride_h
            k = tl.load(k_at[None, :] + dim[:, None], mask=real[None, :] & (dim[:, None] < DIM), other=0.0)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                # tanh(x) = 1 - 2 / (e^2x + 1), which stays finite if e^2x does not.
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

        # A part is never empty. If the model has diverged the total is NaN and stays so.
        mixed = mixed / total[:, None]
        inside = (row[:, None] < GROUP) & (value_dim[None, :] < VALUE_DIM)
        if tl.load(first + sequence + 1) - tl.load(first + sequence) == 1:
            # There is nothing to join.
            at = sequence * num_heads + head
            tl.store(
                output + at[:, None] * VALUE_DIM + value_dim[None, :], mixed.to(output.dtype.element_ty), mask=inside
            )
        else:
            at = part.to(tl.int64) * num_heads + head
            tl.store(weight + at, best + tl.log2(total), mask=row < GROUP)
            tl.store(partial + at[:, None] * VALUE_DIM + value_dim[None, :], mixed, mask=inside)


@triton.jit
def join(
    partial,
    weight,
    first,
    output,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the mean of the parts of one sequence and query head, weighted by their sums of exp; zeros if there are
    none."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1).to(tl.int64)
    begin = tl.load(first + sequence)
    count = tl.load(first + sequence + 1) - begin
    if count != 1:
        part = tl.arange(0, MOST_PARTS)
        w = tl.load(weight + (begin + part) * num_heads + head, mask=part < count, other=float("-inf"))
        best = tl.max(w, 0)
        best = tl.where(count > 0, best, 0.0)
        total = tl.sum(tl.exp2(w - best), 0)
        value_dim = tl.arange(0, VALUE_TILE)
        inside = value_dim < VALUE_DIM
        tile = tl.arange(0, TILE)
        mixed = tl.zeros([VALUE_TILE], tl.float32)
        for start in range(0, count, TILE):
            at = (begin + start + tile) * num_heads + head
            real = start + tile < count
            share = tl.exp2(tl.load(weight + at, mask=real, other=float("-inf")) - best)
            parts = tl.load(
                partial + at[:, None] * VALUE_DIM + value_dim[None, :], mask=real[:, None] & inside[None, :], other=0.0
            )
            mixed += tl.sum(parts * share[:, None], 0)
        mixed = mixed / tl.where(count > 0, total, 1.0)
        at = (sequence * num_heads + head) * VALUE_DIM
        tl.store(output + at + value_dim, mixed.to(output.dtype.element_ty), mask=inside)


@triton.jit
def store(
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
    table_stride_b,
    table_stride_block,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Write the newest key and value of one sequence and key head."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(context_length + sequence) - 1
    if token >= 0:
        entry = block_table + sequence * table_stride_b + (token // BLOCK_SIZE) * table_stride_block
        block = tl.load(entry).to(tl.int64)
        place = token % BLOCK_SIZE
        dim = tl.arange(0, DIM_TILE)
        k = tl.load(key + sequence * key_from_b + head * key_from_h + dim, mask=dim < DIM)
        k_at = key_cache + block * key_stride_block + place * key_stride_token + head * key_stride_h
        tl.store(k_at + dim, k, mask=dim < DIM)
        dim = tl.arange(0, VALUE_TILE)
        v = tl.load(value + sequence * value_from_b + head * value_from_h + dim, mask=dim < VALUE_DIM)
        v_at = value_cache + block * value_stride_block + place * value_stride_token + head * value_stride_h
        tl.store(v_at + dim, v, mask=dim < VALUE_DIM)
