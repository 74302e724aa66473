"""Linear layers through oneDNN on CPUs.

PyTorch multiplies float32 matrices with MKL, which leaves half of a processor idle that it does not know; oneDNN, which
comes with PyTorch as well, does not: 2400 x 128 by 128 x 512 run at 260 instead of 115 GFLOP/s on one core of Zen 5.
Below some size its calls cost more than they save; without AVX-512, where MKL leaves nothing idle, up to a much larger
size. The result differs in the order of summation only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybrid_rl.compat import native

# Rows from which the layers of a model are switched over; a decode batch below it is faster as it is.
SMALLEST_ROWS = 48


@functools.cache
def smallest_product() -> int:
    """Return rows times columns times depth from which oneDNN is at least as fast, for 128 to 4864 columns.

    With AVX-512 that is 2^20 on Zen 5 and 2^24 on Zen 4, which adds up half a register at a time.
    """
    return 1 << (22 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 24)


@functools.cache
def transposes_by_mkl() -> bool:
    """Whether MKL multiplies a transposed left side faster than oneDNN, which copies it first. It does where it leaves
    nothing idle: without AVX-512, and on processors that it knows.

    1264 rows of 576 and 1536 columns: 51 instead of 35 GFLOP/s on a core of Zen 3 (AVX2), and with 49152 columns 43
    instead of 17; 1664 rows: 287 instead of 166 on two cores of a Xeon (Sapphire Rapids). oneDNN keeps the other
    products, for its lead in heads with few rows.
    """
    if not torch.backends.mkl.is_available():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return True
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute left @ right.T + bias. left: [M, K]; right: [N, K]; any strides; bias: [N]. Returns [M, N], for code that
    needs no autograd."""
    size = left.shape[0] * left.shape[1] * right.shape[0]
    if size < smallest_product() or not is_available(left):
        return torch.nn.functional.linear(left, right, bias)
    return _linear(left, right, bias)


def weight_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    """Compute grad.T @ rows without autograd. grad: [M, N]; rows: [M, K]. Returns [N, K]."""
    if transposes_by_mkl():
        return grad.t() @ rows
    # oneDNN falls back to a loop several hundred times slower if what is transposed here has gaps between its rows.
    grad, rows = grad.contiguous(), rows.contiguous()
    # It wants its left side contiguous, so the smaller of the two is the one to be transposed.
    if grad.shape[1] <= rows.shape[1]:
        return product(grad.t(), rows.t())
    return product(rows.t(), grad.t()).t()


def is_available(tensor: Tensor) -> bool:
    """Return whether oneDNN's product applies to tensors like this one."""
    usable = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return usable and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


class Linears:
    """The plain linear layers of a module, which `fast` switches over and back.

    Layers of a subclass, and layers whose forward was replaced, stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers: list[nn.Linear] = [
            m for m in module.modules() if type(m) is nn.Linear and "forward" not in vars(m) and is_available(m.weight)
        ]
        self._forwards: Sequence[Any] = [_Forward(layer) for layer in self._layers]
        self._sizes = [layer.weight.numel() for layer in self._layers]  # whole ones, of sharded layers too
        self.num_rows = 0  # input rows of the block of `fast` that is open now, 0 outside

    @contextmanager
    def fast(self, num_rows: int) -> Iterator[None]:
        """Multiply by oneDNN inside the block, in the layers that are faster so with `num_rows` input rows.

        A block inside another changes nothing."""
        if self.num_rows or num_rows < SMALLEST_ROWS:
            yield
            return
        active = []
        smallest = smallest_product() / num_rows
        for layer, forward, size in zip(self._layers, self._forwards, self._sizes, strict=True):
            if size >= smallest and type(layer) is nn.Linear:  # it may be on a grid by now
                vars(layer)["forward"] = forward
                active.append(layer)
        self.num_rows = num_rows
        try:
            yield
        finally:
            self.num_rows = 0
            for layer in active:
                vars(layer).pop("forward", None)


class _Forward:
    """The replacement of nn.Linear.forward."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        rows = input.reshape(-1, input.shape[-1])
        if torch.is_grad_enabled():
            apply: Any = _Linear.apply
            out = apply(rows, weight, bias)
        else:
            out = _linear(rows, weight, bias)
        return out.view(*input.shape[:-1], weight.shape[0])


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gradients(ctx, grads[0].contiguous())


class ExactLinear(torch.autograd.Function):
    """A linear layer by `exact_product`: rows [M, K], weight [N, K], bias [N] or None to [M, N]. The backward pass
    multiplies as any other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute rows @ weight.T + bias."""
        ctx.save_for_backward(rows, weight)
        return exact_product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Compute the gradients of rows, weight and bias."""
        return _gradients(ctx, grads[0].contiguous())


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight = ctx.saved_tensors
    needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
    return (
        product(grad, weight.t()) if needs_rows else None,
        weight_gradient(grad, rows) if needs_weight else None,
        grad.sum(0) if needs_bias else None,
    )


def exact_product(left: Tensor, right: Tensor, bias: Tensor | None = None, *, in_float32: bool = False) -> Tensor:
    """Compute left @ right.T + bias without autograd (csrc/exact_product.cpp): each number is added up in one order, in
    float32, whatever the other rows and columns are.

    left: float32 or bfloat16 [M, K] on a CPU; right: [N, K] of its dtype; bias: float32 or bfloat16 [N]. Returns [M, N]
    of that dtype, or float32 that was not rounded.
    """
    if 1 not in right.stride():
        right = right.contiguous()
    multiply = native.built_operator("exact_product")
    out: Tensor = multiply(left.contiguous(), right, bias, in_float32)
    return out
