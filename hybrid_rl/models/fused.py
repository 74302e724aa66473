"""Norms and gates of transformer layers by csrc/fused.cpp: CPU, float32, one pass over memory each.

PyTorch computes an RMSNorm by six operators and a SwiGLU's gate by two, each of which writes a result as large as its
input and keeps it for the backward pass. Here a norm keeps its input and one number a row, and a gate its two inputs.

What a class computes is found by trying a small one of it, not by its name: whatever differs from the two formulas
stays as it is, and so does everything if the extension was not built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybrid_rl.compat import native

_SIZE = 8  # of what is tried
_OPERATORS = ("rms_norm", "rms_norm_backward", "silu_gate", "silu_gate_backward")


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    """Compute (weight + offset) * rows / sqrt(mean(rows^2) + epsilon) as PyTorch does: the compiled one's oracle.

    rows: [..., H]; weight: [H]. Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, eq. 4.
    """
    return (weight + offset) * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon))


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute gate * sigmoid(gate) * up by PyTorch's operators: the oracle of the compiled one. Shazeer, "GLU Variants
    Improve Transformer", 2020, eq. 6."""
    return nn.functional.silu(gate) * up


class FusedLayers:
    """The RMSNorms and gated layers of a module, which `active` switches over to the compiled operators and back.

    Layers whose forward was replaced already stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.is_active = False
        self._forwards: list[tuple[dict[str, Any], Callable[..., Tensor]]] = []
        if any(native.operator(name) is None for name in _OPERATORS):
            return
        config, kinds = getattr(module, "config", None), dict[type[nn.Module], _Kind]()
        for layer in module.modules():
            if "forward" in vars(layer) or not (epsilon := _epsilon_of(layer)) and not _has_gate(layer):
                continue
            if type(layer) not in kinds:
                kinds[type(layer)] = _kind_of(type(layer), config)
            kind = kinds[type(layer)]
            if kind.is_gate and _has_gate(layer):
                self._forwards.append((vars(layer), _Gate(layer)))
            elif kind.offset is not None and epsilon and _is_usable(getattr(layer, "weight", None)):
                self._forwards.append((vars(layer), _Norm(layer, epsilon, kind.offset)))

    @contextmanager
    def active(self, is_wanted: bool = True) -> Iterator[None]:
        """Use the compiled operators inside the block. A block inside another changes nothing."""
        if not is_wanted or not self._forwards or self.is_active:
            yield
            return
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        self.is_active = True
        try:
            yield
        finally:
            self.is_active = False
            for attributes, _ in self._forwards:
                attributes.pop("forward", None)


class _Kind(NamedTuple):
    """What a class of layers is: an RMSNorm that adds `offset` to its weight, a SwiGLU, or neither."""

    offset: float | None = None
    is_gate: bool = False


def _has_gate(layer: nn.Module) -> bool:
    return {"gate_proj", "up_proj", "down_proj"} <= {name for name, _ in layer.named_children()}


def _epsilon_of(layer: nn.Module) -> float | None:
    values = (getattr(layer, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if isinstance(value, float)), None)


def _is_usable(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and tensor.device.type in ("cpu", "meta")


def _kind_of(kind: type[nn.Module], config: Any) -> _Kind:
    """Find what a class of layers computes, by trying a small one. config: of the model."""
    rows, weight = _numbers(3, _SIZE), _numbers(_SIZE)
    if len(inspect.signature(kind.forward).parameters) != 2:  # self and the rows: a gate, say, may come with them
        return _Kind()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if (norm := _made(kind, _SIZE)) is not None and _epsilon_of(norm):
                norm.get_parameter("weight").copy_(weight)
                out, epsilon = norm(rows), _epsilon_of(norm) or 0.0
                fits = (offset for offset in (0.0, 1.0) if _agree(out, rms_norm(rows, weight, epsilon, offset)))
                return _Kind(next(fits, None) if len([*norm.parameters()]) == 1 else None)
            small = object.__new__(type(config))  # copy.copy leaves a mark on the class
            vars(small).update(vars(config))
            small.hidden_size = small.intermediate_size = _SIZE
            layer: Any = _made(kind, small)
            if layer is None:
                return _Kind()
            expected = layer.down_proj(silu_gate(layer.gate_proj(rows), layer.up_proj(rows)))
            return _Kind(is_gate=_agree(layer(rows), expected))
    except Exception:  # a class that is called in another way
        return _Kind()


def _made(kind: type[nn.Module], argument: Any) -> nn.Module | None:
    """Make a layer of a class, float32 on the CPU; None if that takes other arguments."""
    try:
        with torch.device("cpu"):
            return kind(argument).float()
    except Exception:
        return None


def _numbers(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0), device="cpu")


def _agree(left: object, right: Tensor) -> bool:
    return isinstance(left, Tensor) and left.shape == right.shape and torch.allclose(left, right, rtol=1e-5, atol=1e-6)


class _Norm:
    """The replacement of an RMSNorm's forward."""

    def __init__(self, layer: nn.Module, epsilon: float, offset: float) -> None:
        self._layer, self._settings = layer, (epsilon, offset)

    def __call__(self, *rows: Tensor, **named: Tensor) -> Tensor:
        (hidden_states,) = (*rows, *named.values())  # whatever the class calls its only argument
        weight: Any = self._layer.weight
        if hidden_states.dtype != torch.float32:
            return rms_norm(hidden_states, weight, *self._settings)
        apply: Any = _RMSNorm.apply
        out: Tensor = apply(hidden_states.contiguous(), weight, self._settings)
        return out


class _Gate:
    """The replacement of a gated layer's forward."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, *rows: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*rows, *named.values())
        layer = self._layer
        gate, up = layer.gate_proj(x), layer.up_proj(x)
        if gate.dtype != torch.float32 or up.dtype != torch.float32:
            product = silu_gate(gate, up)
        else:
            apply: Any = _SiluGate.apply
            product = apply(gate.contiguous(), up.contiguous())
        out: Tensor = layer.down_proj(product)
        return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, settings: tuple[float, float]) -> Tensor:
        out, scales = native.built_operator("rms_norm")(rows, weight, *settings)
        ctx.save_for_backward(rows, weight, scales)
        ctx.offset = settings[1]
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wants_weight = ctx.needs_input_grad[1]
        backward = native.built_operator("rms_norm_backward")
        grad_rows, grad_weight = backward(grads[0].contiguous(), *ctx.saved_tensors, ctx.offset, wants_weight)
        return grad_rows, grad_weight if wants_weight else None, None


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        result: Tensor = native.built_operator("silu_gate")(gate, up)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return native.built_operator("silu_gate_backward")(grads[0].contiguous(), *ctx.saved_tensors)
