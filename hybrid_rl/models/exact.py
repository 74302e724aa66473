"""Forward passes whose numbers do not depend on what is computed together: model.exact.

Every token gets the same bits in a decode step, in a chunk of its prompt and in a packed row of the trainer, whatever
else is there. Attention, RMSNorm and log-probabilities by the compiled extension are so already, and so are PyTorch's
softmax, sums, exponentials, sines and cosines. Left to replace are products (csrc/exact_product.cpp), and functions
whose vectorised loops end in scalar code that rounds otherwise. What is replaced are functions of PyTorch, as layers
call them, and not layers. The backward pass is as usual.

The list is not all of PyTorch: einsum, products of batches of any other kind, and powers with a tensor as exponent are
as they are. The check at the start (packed/exact_check.py) refuses a model whose numbers they change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hybrid_rl.compat import native
from hybrid_rl.compat.torch import grouped_mm
from hybrid_rl.models.linear import ExactLinear, exact_product, product, weight_gradient

OPERATORS = ("exact_product", "packed_attention", "paged_attention", "rms_norm", "label_logprobs")
# Elements that PyTorch computes in one thread, from the first to the last. It divides most functions from 2^15 on
# (at::internal::GRAIN_SIZE), but GELU above 2^14 (ATen/native/cpu/Activation.cpp).
BLOCK = 1 << 13
RUN = 128  # a multiple of the elements that a vectorised loop takes at once, of any dtype and instruction set


def missing_operators() -> list[str]:
    """Return the names of the compiled operators that exact passes need and that are not there."""
    return [name for name in OPERATORS if native.operator(name) is None]


class ExactFunctions(TorchFunctionMode):
    """PyTorch's functions inside the block and in this thread, the same for each row or element whatever is with it.

    Products of float32 and bfloat16 matrices on CPUs, of linear layers and of grouped experts; sigmoid, SiLU, GELU,
    Mish, softplus, powers of 2, powers with a number as exponent, and the reciprocal root. All others are PyTorch's
    own, and so are calls that write into `out`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the replacement of a function, if it has one."""
        replacement, named = _REPLACED.get(func), dict(kwargs or {})
        if replacement is None or named.pop("out", None) is not None:
            return func(*args, **(kwargs or {}))
        return replacement(*args, **named)


def _fits(*tensors: Tensor) -> bool:
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes in ({torch.float32}, {torch.bfloat16}) and all(tensor.device.type == "cpu" for tensor in tensors)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `functional.linear`."""
    if not _fits(input, weight) or weight.dim() != 2:
        return functional.linear(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    if torch.is_grad_enabled():
        apply: Any = ExactLinear.apply
        out: Tensor = apply(rows, weight, bias)
    else:
        out = exact_product(rows, weight, bias)
    return out.view(*input.shape[:-1], weight.shape[0])


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """Compute `torch.matmul`; a depth of 1 has nothing to add up, and products of batches stay PyTorch's."""
    if other.dim() != 2 or input.dim() < 2 or input.shape[-1] == 1:
        return torch.matmul(input, other)
    return _linear(input, other.t())


def _mm(input: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    """Compute `torch.mm`."""
    return torch.mm(input, mat2, **options) if options else _matmul(input, mat2)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **factors: Any) -> Tensor:
    """Compute `torch.addmm` of a vector, as GPT-2's layers call it."""
    if factors or input.dim() != 1:
        return torch.addmm(input, mat1, mat2, **factors)
    return _linear(mat1, mat2.t(), input)


def _grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Compute `functional.grouped_mm` of rows sorted by expert, [S, K], and the experts' matrices, [E, K, N]."""
    is_plain = all(option is None for option in options.values())
    if offs is None or not is_plain or (mat_a.dim(), mat_b.dim()) != (2, 3) or not _fits(mat_a, mat_b):
        return grouped_mm(mat_a, mat_b, offs=offs, **options)
    return _grouped_product(mat_a, mat_b, offs.tolist())


def _bmm(input: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    """Compute `torch.bmm` of [E, M, K] and [E, K, N], as the layers of Llama 4 do with all tokens and each expert."""
    if options or not _fits(input, mat2):
        return torch.bmm(input, mat2, **options)
    size = input.shape[1]
    ends = [size * (group + 1) for group in range(len(input))]
    return _grouped_product(input.reshape(-1, input.shape[2]), mat2, ends).view(*input.shape[:2], -1)


def _grouped_product(left: Tensor, right: Tensor, ends: list[int]) -> Tensor:
    """Multiply rows [S, K], of which each group ends at one of `ends`, by the matrix of their group, [E, K, N]."""
    if torch.is_grad_enabled():
        apply: Any = _GroupedProduct.apply
        out: Tensor = apply(left, right, ends)
        return out
    # Rows after the last group belong to experts of other ranks: nobody reads them.
    out = left.new_zeros(left.shape[0], right.shape[2])
    for expert, rows in _groups(ends):
        out[rows] = exact_product(left[rows], right[expert].t(), None)
    return out


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.ends = ends
        return _grouped_product(left, right, ends)  # without gradients by now

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        left, right = ctx.saved_tensors
        grad_left = torch.zeros_like(left) if ctx.needs_input_grad[0] else None
        grad_right = torch.zeros_like(right) if ctx.needs_input_grad[1] else None
        for expert, rows in _groups(ctx.ends):
            grad = grads[0][rows].contiguous()
            if grad_left is not None:
                grad_left[rows] = product(grad, right[expert])
            if grad_right is not None:
                grad_right[expert] = weight_gradient(left[rows], grad)
        return grad_left, grad_right, None


def _groups(ends: list[int]) -> list[tuple[int, slice]]:
    starts = [0, *ends[:-1]]
    return [
        (group, slice(start, end)) for group, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start
    ]


def _whole_runs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of single elements that never comes to the scalar end of a vectorised loop: it computes blocks
    that one thread takes, filled up to whole runs."""

    def computed(input: Tensor, *args: Any, **options: Any) -> Tensor:
        if input.device.type != "cpu":
            return function(input, *args, **options)
        options.pop("inplace", None)  # of SiLU: the caller takes the result
        flat = input.contiguous().view(-1)  # of numbers with gaps between them, PyTorch takes one at a time
        rest = -flat.numel() % RUN
        filled = functional.pad(flat, (0, rest)) if rest else flat
        blocks = [function(block, *args, **options) for block in filled.split(BLOCK)]
        whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return whole[: flat.numel()].view(input.shape)

    return computed


def _pow(input: Any, exponent: Any) -> Tensor:
    """Compute `torch.pow` of a tensor; squares and cubes are products of its numbers, and powers of other kinds stay
    PyTorch's."""
    if not isinstance(input, Tensor) or isinstance(exponent, Tensor) or exponent in (2, 3):
        return torch.pow(input, exponent)
    return _power(input, exponent)


def _sigmoid_(input: Tensor) -> Tensor:
    """Compute `Tensor.sigmoid_`."""
    return input.copy_(_sigmoid(input))


_power, _sigmoid = _whole_runs(torch.pow), _whole_runs(torch.sigmoid)
_REPLACED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    functional.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.mm, Tensor.mm), _mm),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    grouped_mm: _grouped_mm,
    **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _pow),
    Tensor.sigmoid_: _sigmoid_,
    **{
        function: _whole_runs(function)
        for function in (
            *(torch.sigmoid, Tensor.sigmoid, functional.silu, functional.gelu, functional.mish, functional.softplus),
            *(torch.rsqrt, Tensor.rsqrt, torch.exp2, Tensor.exp2, torch.special.exp2),
        )
    },
}
