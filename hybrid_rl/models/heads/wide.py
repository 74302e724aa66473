"""Products of 16-bit matrices whose sums stay float32; a linear layer would round them to 16 bits.

Products of two such numbers are exact in float32, so only the order of summation is left open. No whole matrix is
copied to float32: on CUDA the tensor cores sum in float32 anyway (`mm` with an out_dtype, which PyTorch has there and
nowhere else: 2.11 to 2.13), on CPUs a block of the matrix at a time is widened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rl.models.linear import product, weight_gradient

BLOCK_ELEMENTS = 1 << 20  # elements of a matrix that are float32 at once on a CPU: 4 MiB, which its caches hold


def wide_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute left @ right.T + bias in float32, for code that needs no autograd.

    left: [M, K], of the dtype of right or float32; right: bfloat16, float16 or float32 [N, K], any strides; bias: [N]
    of any dtype. Returns float32 [M, N]. A float32 left with a bfloat16 right is taken as the sum of two bfloat16
    matrices on CUDA: good to 16 bits and more, float32 has 24.

    Raises ValueError for other dtypes.
    """
    if left.dtype not in (right.dtype, torch.float32) or right.dtype not in _DTYPES:
        raise ValueError(
            f"left is {left.dtype} and right {right.dtype}; give bfloat16, float16 or float32, left alike or float32"
        )
    if right.dtype == torch.float32:
        out = product(left, right)
    elif right.is_cuda:
        out = _on_tensor_cores(left, right)
    else:
        out = _in_blocks(left.float(), right)
    return out if bias is None else out.add_(bias)


def wide_weight_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    """Compute grad.T @ rows in float32, without autograd. grad: [M, N], of the dtype of rows or float32; rows: [M, K]
    as the right side of `wide_product`. Returns float32 [N, K]."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return wide_product(grad.t(), rows.t())
    return weight_gradient(grad.float(), rows.float())  # rows are few, a head is large


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _on_tensor_cores(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype == right.dtype:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    high, low = halves(left, right.dtype)
    return torch.mm(high, right.t(), out_dtype=torch.float32).add_(torch.mm(low, right.t(), out_dtype=torch.float32))


def halves(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two tensors of a narrow dtype whose sum is float32 `values`, but for a rounding of the second."""
    high = values.to(dtype)
    return high, (values - high).to(dtype)


def _in_blocks(left: Tensor, right: Tensor) -> Tensor:
    """Multiply by blocks of whole rows of memory: rows of right, or its columns if it is a transposed matrix."""
    num_rows, depth = right.shape
    out = left.new_zeros(left.shape[0], num_rows)
    if right.stride(1) == 1 or depth == 1:
        size = max(1, BLOCK_ELEMENTS // max(depth, 1))
        for start in range(0, num_rows, size):
            out[:, start : start + size] = product(left, right[start : start + size].float())
        return out
    size = max(1, BLOCK_ELEMENTS // max(num_rows, 1))
    for start in range(0, depth, size):
        columns = slice(start, start + size)
        # oneDNN wants its left side without gaps between the rows.
        out += product(left[:, columns].contiguous(), right[:, columns].float())
    return out
