"""A linear layer with an adapter, as peft's, with fewer operations. Imported where peft is used."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional

from hybrid_rl.models.lora.plain import ADAPTER, wrappers


class AdaptedLinear(Linear):
    """W x + s B A x, the product with B added to W x by the same kernel. What peft computes otherwise (DoRA, adapters
    that are switched off or merged, other dtypes), it does here too.

    peft's own forward has four operations and as many temporaries, and looks up what cannot change here; a pass of an
    engine, with few rows, is mostly such things.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer of an input [..., in]. Returns [..., out]."""
        a, b = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        if args or kwargs or x.dtype != a.dtype or not self._is_usual:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        base: Tensor = self.base_layer(x)
        inner = functional.linear(x.reshape(-1, x.shape[-1]), a)
        rows = base.view(-1, base.shape[-1])
        # In place only where nobody needs what was there; both ways have the same bits.
        add = torch.addmm if torch.is_grad_enabled() else torch.Tensor.addmm_
        return add(rows, inner, b.t(), alpha=self.scaling[ADAPTER]).view(base.shape)

    @property
    def _is_usual(self) -> bool:
        is_on = self.active_adapter in (ADAPTER, [ADAPTER]) and not (self.disable_adapters or self.merged_adapters)
        return is_on and not (self.lora_variant or self.lora_bias[ADAPTER])


def use_adapted_linears(module: nn.Module) -> None:
    """Let the adapted linear layers of a module run so; what they hold stays."""
    for _, _, wrapper in wrappers(module):
        if type(wrapper) is Linear:
            wrapper.__class__ = AdaptedLinear
