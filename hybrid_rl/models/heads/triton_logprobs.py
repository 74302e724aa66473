"""Log-probability and entropy of given tokens from hidden states as Triton kernels: logits live in registers only.

Forward: a program holds a tile of rows and walks over a share of the vocabulary; the logarithm of the sum of exps and
the entropy are taken online (Milakov and Gimelshein, arXiv:1805.02867; Cut Your Losses, arXiv:2411.09009). Backward:
the logits are computed again, a range of columns for all rows at a time, and become their own gradient; two plain
matrix products turn that into the gradients of hidden states and head. A range holds all rows, so the gradient of its
part of the head is complete at once and needs no float32 copy of the head.

The same numbers as `models/heads/logprobs.py`, which is the oracle: logits are rounded to the dtype of the hidden
states, so is their gradient (neither is with `in_float32`), and every sum is taken in float32.

Importing this file imports Triton, which only its callers on CUDA need.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_rl.models.heads.logit_options import HeadOptions
from hybrid_rl.models.heads.wide import wide_product

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parts of the vocabulary and row tiles that run side by side: they fill a GPU, and what they share stays in its cache.
NUM_PARTS = 16
ROW_GROUP = 16
# Elements that a range may have, in the gradient of its logits and in that of its part of the head; and the fewest
# columns: each range reads and writes the gradient of the hidden states once, which wide ranges make up for.
RANGE_ELEMENTS = 1 << 26
MIN_RANGE = 4096


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    options: HeadOptions = HeadOptions(),  # noqa: B008
) -> tuple[Tensor, Tensor]:
    """Compute ln p(label) and entropy (nats) of softmax(logits / temperature).

    Args:
        hidden: float32, bfloat16 or float16 [M, H].
        weight: [V, H] of the same dtype.
        bias: [V] of the same dtype, or None.
        labels: int64 [M], each below V; NaN comes back for one that is not.
        options: how hidden states become logits; with in_float32 the gradient of the logits takes twice the memory.

    Returns:
        Two float32 tensors [M], differentiable in hidden, weight and bias.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, or an option out of its range.
    """
    _check(hidden, weight, bias, labels, temperature, options)
    apply: Any = _LinearLogprobs.apply
    logprobs, entropy = apply(hidden, weight, bias, labels, temperature, options)
    return logprobs, entropy


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        ctx.settings = temperature, options
        best, log_total, logprobs, entropy = _statistics(hidden, weight, bias, labels, temperature, options)
        ctx.save_for_backward(hidden, weight, bias, labels, best, log_total, entropy)
        # Entropy is saved too: what the caller gets must be another tensor, which it may change.
        return logprobs, entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, labels, *rows = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        rows += [grad.contiguous() for grad in grads]  # the gradient of a sum has a stride of 0
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and wants_bias else None
        num_rows, num_columns = hidden.shape[0], weight.shape[0]
        tile = _tiles(hidden)["COLUMNS"]
        width = max(MIN_RANGE, RANGE_ELEMENTS // max(hidden.shape)) // tile * tile
        for start in range(0, num_columns if num_rows else 0, width):
            columns = slice(start, min(start + width, num_columns))
            grad = _logit_gradients(hidden, weight, bias, labels, rows, columns, *ctx.settings)
            if grad_hidden is not None:
                grad_hidden += wide_product(grad, weight[columns].t())
            if grad_weight is not None:
                grad_weight[columns] = wide_product(grad.t(), hidden.t())
            if grad_bias is not None:
                grad_bias[columns] = grad.sum(0, dtype=torch.float32)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None


def _statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, options: HeadOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute for each row, float32 [M]: its largest logit / temperature, ln of the sum of exps after that was
    subtracted, ln p(label), entropy."""
    num_rows, num_columns = hidden.shape[0], weight.shape[0]
    tiles = _tiles(hidden)
    num_tiles = triton.cdiv(num_columns, tiles["COLUMNS"])
    tiles_of_part = triton.cdiv(num_tiles, NUM_PARTS)
    num_parts = triton.cdiv(num_tiles, tiles_of_part)  # none of them is empty
    best, total, mean = hidden.new_empty(3, num_parts, num_rows, dtype=torch.float32)
    chosen = hidden.new_full((num_rows,), torch.nan, dtype=torch.float32)
    if num_rows:
        _sum_up[(triton.cdiv(num_rows, tiles["ROWS"]) * num_parts,)](
            *_operands(hidden, weight, bias),
            *(labels, best, total, mean, chosen),
            *(*_numbers(temperature, options), num_rows, num_columns, tiles_of_part, num_parts),
            **_constants(hidden, bias, options),
            **tiles,
        )
    top = best.amax(0)
    shrink = torch.exp(best - top)
    log_total = (shrink * total).sum(0).log()
    # mean: sum of exp(z - best) (z - best) over a part
    mean = (shrink * (mean + (best - top) * total)).sum(0) / log_total.exp()
    return top, log_total, (chosen - top) - log_total, log_total - mean


def _logit_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    rows: list[Tensor],
    columns: slice,
    temperature: float,
    options: HeadOptions,
) -> Tensor:
    """Compute the gradient of some columns of hidden weight^T + bias, in the dtype of hidden (or float32) [M, columns]:
    a view into rows of whole tiles. Each row starts at an aligned address, whatever the vocabulary, so that a thread
    stores 16 bytes at once and the products that follow read aligned rows.

    rows: float32 [M] each: largest logit, ln of the sum, entropy, gradients of ln p and of the entropy.
    """
    num_rows, width = hidden.shape[0], columns.stop - columns.start
    tiles = _tiles(hidden)
    num_tiles = triton.cdiv(width, tiles["COLUMNS"])
    dtype = torch.float32 if options.in_float32 else hidden.dtype
    grad = hidden.new_empty(num_rows, num_tiles * tiles["COLUMNS"], dtype=dtype)
    _differentiate[(triton.cdiv(num_rows, tiles["ROWS"]) * num_tiles,)](
        *_operands(hidden, weight, bias),
        *(labels, *rows, grad, grad.stride(0)),
        *(*_numbers(temperature, options), num_rows, columns.start, columns.stop, num_tiles),
        **_constants(hidden, bias, options),
        **tiles,
    )
    return grad[:, :width]


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """Return the first arguments of both kernels. If there is no bias, the weight in its place is never read."""
    return (hidden, weight, weight if bias is None else bias, *hidden.stride(), *weight.stride())


def _numbers(temperature: float, options: HeadOptions) -> tuple[float, float, float]:
    # As floats: an int would be compiled for again, and 1 as a constant.
    return float(options.scale), float(options.softcap or 0), float(temperature)


def _constants(hidden: Tensor, bias: Tensor | None, options: HeadOptions) -> dict[str, Any]:
    """Return the constants that kernels are compiled for, except tiles."""
    return {
        "DEPTH": hidden.shape[1],
        "HAS_BIAS": bias is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "ROUNDED": not options.in_float32,
        # Triton's interpreter multiplies the bits of bfloat16 as integers; their products are exact in float32 too.
        "WIDEN": hidden.device.type == "cpu",
        "ROW_GROUP": ROW_GROUP,
    }


def _tiles(hidden: Tensor) -> dict[str, Any]:
    """Return rows, columns and depth of a tile, and how it is run. float32 runs outside of the tensor cores."""
    if hidden.element_size() == 4:
        return {"ROWS": 64, "COLUMNS": 64, "STEP": 32, "num_warps": 4, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": 128, "STEP": 64, "num_warps": 8, "num_stages": 3}


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, options: HeadOptions
) -> None:
    if hidden.dim() != 2 or hidden.dtype not in DTYPES:
        raise ValueError(f"hidden is {hidden.dtype} {list(hidden.shape)}; give float32, bfloat16 or float16 [M, H]")
    num_columns = max(weight.shape[0], 1)
    wanted = {
        "weight": (weight, hidden.dtype, [num_columns, hidden.shape[1]]),
        "bias": (hidden.new_zeros(num_columns) if bias is None else bias, hidden.dtype, [num_columns]),
        "labels": (labels, torch.int64, [hidden.shape[0]]),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        is_laid_out = name == "weight" or tensor.is_contiguous()
        if list(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != hidden.device or not is_laid_out:
            raise ValueError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} on {tensor.device} does not go with hidden, "
                f"{hidden.dtype} {list(hidden.shape)} on {hidden.device}; give {dtype} {shape} there, contiguous"
            )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap={options.softcap} must be above 0, or None")


@triton.jit
def _place(num_rows, num_parts, ROWS: tl.constexpr, ROW_GROUP: tl.constexpr):
    """Return the row tile and the part of the columns of a program: those that run at once share both."""
    program = tl.program_id(0)
    num_tiles = tl.cdiv(num_rows, ROWS)
    group = program // (ROW_GROUP * num_parts)
    in_group = program % (ROW_GROUP * num_parts)
    size = tl.minimum(num_tiles - group * ROW_GROUP, ROW_GROUP)
    return group * ROW_GROUP + in_group % size, in_group // size


@triton.jit
def _logits(
    hidden, weight, bias, hidden_stride, hidden_step, weight_stride, weight_step,
    first_row, first_column, scale, softcap, num_rows, num_columns,
    DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROUNDED: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute the logits of a tile before the temperature, float32. Rows and columns past the end repeat the last
    one."""
    row = tl.minimum(tl.arange(0, ROWS), num_rows - 1 - first_row)
    column = tl.minimum(tl.arange(0, COLUMNS), num_columns - 1 - first_column)
    step = tl.arange(0, STEP)
    # A head has more than 2^31 elements, a tile has not.
    hidden += tl.cast(first_row, tl.int64) * hidden_stride
    weight += tl.cast(first_column, tl.int64) * weight_stride
    left_at = row[:, None] * hidden_stride + step[None, :] * hidden_step
    right_at = column[None, :] * weight_stride + step[:, None] * weight_step
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, DEPTH, STEP):
        if DEPTH % STEP == 0:
            left = tl.load(hidden + left_at)
            right = tl.load(weight + right_at)
        else:
            left = tl.load(hidden + left_at, mask=step[None, :] < DEPTH - start, other=0.0)
            right = tl.load(weight + right_at, mask=step[:, None] < DEPTH - start, other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        hidden += STEP * hidden_step
        weight += STEP * weight_step
    if HAS_BIAS:
        sums += tl.load(bias + first_column + column).to(tl.float32)[None, :]
    if ROUNDED:  # as a plain linear layer rounds its output, which is what an engine samples from
        sums = sums.to(hidden.dtype.element_ty).to(tl.float32)
    logits = sums * scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), which stays finite if e^2x does not.
        logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
    return logits


@triton.jit
def _sum_up(
    hidden, weight, bias, hidden_stride, hidden_step, weight_stride, weight_step,
    labels,
    best_out,  # float32 [num_parts, M]: the largest logit / temperature, z, of the part
    total_out,  # the sum of exp(z - best)
    mean_out,  # the sum of exp(z - best) (z - best)
    chosen_out,  # [M]: z of the label, written by the part that has it
    scale, softcap, temperature, num_rows, num_columns, tiles_of_part, num_parts,
    DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROUNDED: tl.constexpr, WIDEN: tl.constexpr,
    ROW_GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sum up one tile of rows over one part of the vocabulary."""
    row_tile, part = _place(num_rows, num_parts, ROWS, ROW_GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    label = tl.load(labels + row, mask=real, other=-1)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS], tl.float32)
    chosen = tl.zeros([ROWS], tl.float32)
    first = part * tiles_of_part * COLUMNS
    last = tl.minimum(first + tiles_of_part * COLUMNS, num_columns)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        z = _logits(
            hidden, weight, bias, hidden_stride, hidden_step, weight_stride, weight_step, row_tile * ROWS, start,
            scale, softcap, num_rows, num_columns, DEPTH, HAS_BIAS, HAS_SOFTCAP, ROUNDED, WIDEN, ROWS, COLUMNS, STEP,
        )  # fmt: skip
        z = z / temperature
        there = column[None, :] < num_columns
        new_best = tl.maximum(best, tl.max(tl.where(there, z, float("-inf")), 1))
        below = tl.where(there, z - new_best[:, None], 0.0)
        exps = tl.where(there, tl.exp(below), 0.0)
        # Before the first tile best is -inf, and there is nothing to shift.
        shift = tl.where(total == 0, 0.0, best - new_best)
        shrink = tl.exp(shift)
        mean = shrink * (mean + shift * total) + tl.sum(exps * below, 1)
        total = shrink * total + tl.sum(exps, 1)
        chosen += tl.sum(tl.where(column[None, :] == label[:, None], z, 0.0), 1)
        best = new_best
    at = part.to(tl.int64) * num_rows + row
    tl.store(best_out + at, best, mask=real)
    tl.store(total_out + at, total, mask=real)
    tl.store(mean_out + at, mean, mask=real)
    tl.store(chosen_out + row, chosen, mask=real & (label >= first) & (label < last))


@triton.jit
def _differentiate(
    hidden, weight, bias, hidden_stride, hidden_step, weight_stride, weight_step,
    labels,
    best_in, log_total_in, entropy_in, grad_logprob_in, grad_entropy_in,
    grad_out,  # [M, num_tiles * COLUMNS]; numbers past the end are written too, and not read
    grad_stride,
    scale, softcap, temperature, num_rows, begin, end, num_tiles,
    DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROUNDED: tl.constexpr, WIDEN: tl.constexpr,
    ROW_GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tile of hidden weight^T + bias, from those of ln p(label) and entropy.

    What follows the product is computed in the layout of the store. Rows of unknown alignment would be stored element
    by element: a thread would have one column of 64 rows, and keep the label and five numbers of each, more than there
    are registers (2 KB of a thread in local memory with Triton 3.6). With 16-byte stores it has 8 columns of 8 rows.
    2 H V operations and 2 V bytes (16 bits) per row of hidden states.
    """
    row_tile, tile = _place(num_rows, num_tiles, ROWS, ROW_GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    real = row < num_rows
    logits = _logits(
        hidden, weight, bias, hidden_stride, hidden_step, weight_stride, weight_step, row_tile * ROWS,
        begin + tile * COLUMNS, scale, softcap, num_rows, end, DEPTH, HAS_BIAS, HAS_SOFTCAP, ROUNDED, WIDEN,
        ROWS, COLUMNS, STEP,
    )  # fmt: skip
    # Counted from the first column of the tile: 64 bits would take registers, of the columns too.
    label = (tl.load(labels + row, mask=real, other=-1) - (begin + tile * COLUMNS)).to(tl.int32)
    best = tl.load(best_in + row, mask=real, other=0.0)
    log_total = tl.load(log_total_in + row, mask=real, other=0.0)
    entropy = tl.load(entropy_in + row, mask=real, other=0.0)
    grad_logprob = tl.load(grad_logprob_in + row, mask=real, other=0.0)
    grad_entropy = tl.load(grad_entropy_in + row, mask=real, other=0.0)
    log_p = (logits / temperature - best[:, None]) - log_total[:, None]
    # d ln p_label / dz = onehot - p; d entropy / dz = -p (ln p + entropy)
    grad = -tl.exp(log_p) * (grad_logprob[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None]))
    grad += tl.where(column[None, :] == label[:, None], grad_logprob[:, None], 0.0)
    grad *= scale / temperature
    if HAS_SOFTCAP:
        share = logits * (1.0 / softcap)
        grad *= 1.0 - share * share
    at = row.to(tl.int64)[:, None] * grad_stride + (tile * COLUMNS + column)[None, :]
    tl.store(grad_out + at, grad.to(grad_out.dtype.element_ty), mask=real[:, None])
