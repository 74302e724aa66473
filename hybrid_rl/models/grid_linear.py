"""Training on the grid of a quantised engine: linear layers whose forward pass computes with quantised weights.

The gradient goes to the weights as if they had not been quantised: the straight-through estimator (Bengio, Leonard and
Courville, "Estimating or propagating gradients through stochastic neurons", 2013). With Q(W) the weights on the grid,

    y = x Q(W)^T + b,    dL/dx = dL/dy Q(W),    dL/dW = (dL/dy)^T x

Q(W) is computed in the forward pass and again in the backward pass, and kept by neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from hybrid_rl.errors import ConfigError
from hybrid_rl.models.linear import product, weight_gradient
from hybrid_rl.weights.grids import GRIDS, Grid, grid_weights, joined_names
from hybrid_rl.weights.plain import is_adapted


class GridLinear(nn.Linear):
    """A linear layer on a grid. siblings: the layers that share the scale of a whole weight, itself among them."""

    grid: Grid
    siblings: tuple[nn.Linear, ...]

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> [..., out]."""
        apply: Any = _OnGrid.apply
        rows = input.reshape(-1, input.shape[-1])
        out: Tensor = apply(rows, self.weight, self.bias, self)
        return out.view(*input.shape[:-1], out.shape[-1])

    @torch.no_grad()
    def quantised(self) -> Tensor:
        """Return the weight that an engine on this grid computes with, [out, in], in the layer's dtype."""
        layers = self.siblings if self.grid.whole_scale else (self,)
        maxima = torch.stack([self.grid.maxima(layer.weight) for layer in layers]).amax(0)
        parts = self.grid.quantise(self.weight, maxima, self.weight.dtype)
        return self.grid.dequantise(parts).to(self.weight.dtype)


def train_on_grid(module: PreTrainedModel, name: str, joined: Sequence[frozenset[str]] | None = None) -> None:
    """Put the linear layers of a model on a grid, in place; the head, embeddings and norms stay. name: in GRIDS. A
    sharded model will do, whose layers are whole when they run. joined: names of weights that an engine has as one;
    None: the usual ones.

    Raises ConfigError for a model that has other matrices, or rows that the grid does not divide.
    """
    names = grid_weights(module, name)
    layers = {weight_name: module.get_submodule(weight_name.removesuffix(".weight")) for weight_name in names}
    joined = joined_names(names) if joined is None else joined
    groups = {weight_name: group for group in joined for weight_name in group}
    for weight_name, layer in layers.items():
        if type(layer) is not nn.Linear:
            raise ConfigError(
                f"rollout.quantization={name} cannot compute {weight_name} as the engine does: its layer is a "
                f"{type(layer).__name__}, not a plain nn.Linear; leave it out"
            )
        layer.__class__ = GridLinear
        group = groups.get(weight_name, frozenset({weight_name}))
        vars(layer).update(grid=GRIDS[name], siblings=tuple(layers[each] for each in sorted(group)))


@contextmanager
def on_grid(module: PreTrainedModel, name: str, joined: Sequence[frozenset[str]] | None = None) -> Iterator[None]:
    """Let a model compute as an engine on a grid does inside the block, to be compared with it. A name that is not in
    GRIDS, and a model with adapters, whose engine quantises what they are merged into, change nothing. joined: as for
    `train_on_grid`."""
    is_there = any(isinstance(layer, GridLinear) for layer in module.modules())
    if name not in GRIDS or is_there or is_adapted(module):
        yield
        return
    train_on_grid(module, name, joined)
    try:
        yield
    finally:
        leave_grid(module)


def leave_grid(module: nn.Module) -> None:
    """Make the layers of a model plain again, in place."""
    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, GridLinear)]
    for layer in layers:
        del layer.grid, layer.siblings
        layer.__class__ = nn.Linear


class _OnGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, layer: GridLinear) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.layer = layer
        return product(rows, layer.quantised(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            product(grad, ctx.layer.quantised().t()) if needs_rows else None,
            weight_gradient(grad, rows).to(weight.dtype) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
        )
