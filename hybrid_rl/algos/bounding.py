"""A bound with the gradient of what it bounds, as a function of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Bounded(torch.autograd.Function):
    """min(values, limit), whose gradient is that of the values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, limit: float) -> Tensor:
        return values.clamp(max=limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
