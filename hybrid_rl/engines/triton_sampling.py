"""From logits to tokens on a GPU, in two launches: temperature, log-softmax, the draw, and ln p of what was drawn.

The first kernel reads every logit once, in blocks of BLOCK columns: of each block the largest logit and, in float64,
the sum of e^((logit - largest) / temperature). The second puts the blocks of a row together, finds the block in which
the cumulative distribution passes the row's uniform number, and reads that one block again for the token. Two launches
rather than one: a single row of a large vocabulary is then spread over the device, and nothing but one block is read
twice. Weights are float32, all sums float64: next to a sum of 1, float32 would lose the tokens below p = 1e-7.

How exact a draw is: let a = (best - logit) / temperature. What the device rounds on the way to the weight e^-a (the
difference, a division of 2 units in the last place, the factor log2 e, two exponentials of 2^-22 each) changes it by a
factor of at most 1 + (3.5 a + 4) 2^-23. The mean of a over a distribution of V tokens is at most ln V, because entropy
is, so any share of the sum of weights is off by at most `draw_error(V)` = 2 (3.5 ln V + 4) 2^-23: 1.1e-5 for 152k
tokens. A uniform number further than that from every border of the cumulative distribution gives the token that exact
arithmetic gives. The logprob takes no part in that: it is the logit itself, in float64, less the logarithm of the sum,
whose relative error is half of `draw_error`.

Importing this file imports Triton, which only its callers on CUDA need.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw_error(num_columns: int) -> float:
    """Return how far the cumulative distribution over so many tokens may be off."""
    return 2 * (3.5 * math.log(max(num_columns, 2)) + 4) * 2.0**-23


def choose(logits: Tensor, temperature: Tensor, uniform: Tensor, out: Tensor | None = None) -> Tensor:
    """Choose one token per row and state its logprob, without truncation.

    Args:
        logits: float32, bfloat16 or float16 [B, V], V at most 2^24; the last dim contiguous.
        temperature: float32 [B]; 0 = the best token, the first of several.
        uniform: float64 [B] in (0, 1).
        out: int32 [B, 2], contiguous, to write into; None = a new one.

    Returns:
        int32 [B, 2]: the token, and the bits of its float32 ln p under the tempered distribution; for temperature 0
        under the model's own. NaN if a row is not a distribution: a logit is NaN or +inf, or none is above -inf.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    _check(logits, temperature, uniform, out)
    batch, num_columns = logits.shape
    if out is None:
        out = torch.empty(batch, 2, dtype=torch.int32, device=logits.device)
    if batch == 0:
        return out
    num_blocks = triton.cdiv(num_columns, BLOCK)
    best = logits.new_empty(batch, num_blocks, dtype=torch.float32)
    total = logits.new_empty(batch, num_blocks, dtype=torch.float64)
    constants, launch = _block_constants()
    _summarise[(batch, num_blocks)](
        logits, temperature, best, total, logits.stride(0), num_columns, **constants, **launch
    )
    constants, launch = _draw_constants(num_columns)
    _draw[(batch,)](
        logits, temperature, uniform, best, total, out, logits.stride(0), num_columns, num_blocks, **constants, **launch
    )
    return out


def _check(logits: Tensor, temperature: Tensor, uniform: Tensor, out: Tensor | None) -> None:
    if logits.dim() != 2 or logits.dtype not in _DTYPES or not 1 <= logits.shape[1] <= 2**24 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; give float32, bfloat16 or float16 [B, V], V from 1 to "
            "2^24, the last dim contiguous"
        )
    expected: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {
        "temperature": (temperature, torch.float32, (len(logits),)),
        "uniform": (uniform, torch.float64, (len(logits),)),
    }
    if out is not None:
        expected["out"] = (out, torch.int32, (len(logits), 2))
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; give {dtype} {list(shape)}, contiguous")
        if tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}; give both on one device")


_Constants = tuple[dict[str, Any], dict[str, int]]  # of a kernel; how it is launched


def _block_constants() -> _Constants:
    return {"BLOCK": BLOCK}, {"num_warps": 4, "num_stages": 1}


def _draw_constants(num_columns: int) -> _Constants:
    blocks = max(2, triton.next_power_of_2(triton.cdiv(num_columns, BLOCK)))
    return {"BLOCK": BLOCK, "BLOCKS": blocks}, {"num_warps": 4, "num_stages": 1}


@triton.jit
def _summarise(logits, temperature, best, total, stride, num_columns, BLOCK: tl.constexpr):
    """Compute the largest logit of one block of one row (NaN if one of them is NaN or +inf), and the sum of the
    weights."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    top = tl.max(tl.where(x == x, x, float("-inf")), 0)
    degree = tl.load(temperature + row)
    degree = tl.where(degree > 0, degree, 1.0)
    weight = tl.where(x > float("-inf"), tl.exp((x - top) / degree), 0.0)
    at = row * tl.num_programs(1) + block
    tl.store(best + at, tl.where(broken > 0, float("nan"), top))
    tl.store(total + at, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def _draw(
    logits,
    temperature,
    uniform,
    best,  # float32 [B, num_blocks]
    total,  # float64 [B, num_blocks]
    out,  # int32 [B, 2]
    stride,
    num_columns,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draw the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    there = index < num_blocks
    tops = tl.load(best + row * num_blocks + index, mask=there, other=float("-inf"))
    broken = tl.max((tops != tops).to(tl.int32), 0)
    top = tl.max(tl.where(tops == tops, tops, float("-inf")), 0)
    degree = tl.load(temperature + row)
    greedy = degree <= 0
    degree = tl.where(greedy, 1.0, degree)
    # A best token that overflows when it is tempered leaves no distribution either.
    broken = (broken > 0) | (top == float("-inf")) | (tl.abs(top / degree) == float("inf"))
    safe = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.load(total + row * num_blocks + index, mask=there, other=0.0)
    sums = tl.where(tops > float("-inf"), sums * tl.exp((tops - safe) / degree).to(tl.float64), 0.0)
    everything = tl.sum(sums, 0)
    reached = tl.cumsum(sums, 0)
    target = tl.load(uniform + row) * everything

    # The first block that reaches the target; if rounding left it out of reach, the last one that has any weight.
    last = tl.max(tl.where(sums > 0, index, 0), 0)
    drawn = tl.minimum(tl.min(tl.where((reached >= target) & (sums > 0), index, BLOCKS), 0), last)
    block = tl.where(greedy, tl.min(tl.where((tops == top) & there, index, BLOCKS - 1), 0), drawn)
    block = tl.minimum(block, num_blocks - 1)
    before = tl.sum(tl.where(index < block, sums, 0.0), 0)
    own = tl.sum(tl.where(index == block, tops, 0.0), 0)

    place = tl.arange(0, BLOCK)
    column = block * BLOCK + place
    x = tl.load(logits + row * stride + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
    shrink = tl.exp((own - safe) / degree).to(tl.float64)
    weight = tl.where(x > float("-inf"), tl.exp((x - own) / degree), 0.0).to(tl.float64) * shrink
    inner = before + tl.cumsum(weight, 0)
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    drawn = tl.minimum(tl.min(tl.where((inner >= target) & (weight > 0), place, BLOCK), 0), last)
    first_best = tl.min(tl.where(x == top, place, BLOCK - 1), 0)
    token = tl.where(greedy, first_best, drawn)
    chosen = tl.sum(tl.where((place == token) & (x > float("-inf")), x, 0.0), 0)
    logprob = ((chosen.to(tl.float64) - safe.to(tl.float64)) / degree.to(tl.float64) - tl.log(everything)).to(
        tl.float32
    )
    logprob = tl.where(broken, float("nan"), logprob)
    token = tl.where(broken, 0, block * BLOCK + token)
    tl.store(out + row * 2, token)
    tl.store(out + row * 2 + 1, logprob.to(tl.int32, bitcast=True))
