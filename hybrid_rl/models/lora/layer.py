"""A linear layer with an adapter, as peft's, that costs less without gradients. Imported where peft is used."""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from hybrid_rl.weights.plain import ADAPTER


class AdaptedLinear(Linear):
    """W x + s B A x with the bits of peft's own layer, which it leaves to compute all that needs gradients, and what is
    not plain: DoRA, adapters that are switched off or merged.

    A pass of an engine has few rows. What peft does around its products, lookups and new tensors for everything, then
    takes longer than they do.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer of an input [..., in]. Returns [..., out]."""
        result: Tensor
        if torch.is_grad_enabled() or args or kwargs or not self._is_plain:
            result = super().forward(x, *args, **kwargs)
            return result
        parts, scale = self._modules, self.scaling[ADAPTER]  # looked up here, modules cost microseconds less
        result = parts["base_layer"](x)  # type: ignore[misc]
        change = parts["lora_B"]._modules[ADAPTER](parts["lora_A"]._modules[ADAPTER](x))  # type: ignore[union-attr, misc]
        if change.dtype != result.dtype:
            return (result + change * scale).to(result.dtype)
        if abs(math.frexp(scale)[0]) == 0.5:  # a power of two: scaling rounds nothing
            return result.add_(change, alpha=scale)
        return result.add_(change.mul_(scale))

    @property
    def _is_plain(self) -> bool:
        is_on = self.active_adapter in (ADAPTER, [ADAPTER]) and not (self.disable_adapters or self.merged_adapters)
        return is_on and not self.lora_variant


def use_adapted_linears(module: nn.Module) -> None:
    """Let the adapted linear layers of a module run so; what they hold stays."""
    for child in module.modules():
        if type(child) is Linear:
            child.__class__ = AdaptedLinear
