"""Low-rank changes of weights: what adapters add to the tensors of a model, box by box.

A changed element has the same bits wherever and in whatever box it is computed: products and sums are rounded to
float32 one by one, in the order of the rank, so a sharded trainer and a tensor-parallel engine agree to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_rl.weights.boxes import Box


@dataclass(frozen=True)
class LowRank:
    """The change of one tensor: W + scale * B A, of fused experts one product each.

    a: float32 [r, in] or [experts, r, in]; b: float32 [out, r] or [experts, out, r]; is_transposed: whether the tensor
    is stored as [in, out] (experts of some families). row_factor: float32 [out], by which the sum is multiplied (DoRA:
    magnitude over norm), of tensors without experts; None = 1. dtype: in which the trainer computes; W is rounded to it
    first, if it is kept in a wider one. The same object on all ranks.
    """

    a: Tensor
    b: Tensor
    scale: float
    is_transposed: bool = False
    row_factor: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that is changed."""
        experts, out, into = self.b.shape[:-2], self.b.shape[-2], self.a.shape[-1]
        return (*experts, into, out) if self.is_transposed else (*experts, out, into)

    @property
    def rank(self) -> int:
        """The rank of the change."""
        return self.b.shape[-1]

    def ready(self, device: torch.device) -> LowRank:
        """Return the same change on a device, contiguous, with its scale in B: rounded as `merged` rounds it."""
        b = (self.b * self.scale).to(device).contiguous()
        factor = None if self.row_factor is None else self.row_factor.to(device).contiguous()
        return replace(self, a=self.a.to(device).contiguous(), b=b, scale=1.0, row_factor=factor)

    def merged(self, base: Tensor, box: Box) -> Tensor:
        """Return a box of the changed tensor, float32. base: that box of the unchanged one, any float dtype."""
        rows, columns = (box[-1], box[-2]) if self.is_transposed else (box[-2], box[-1])
        left = (self.b[(*box[:-2], rows)] * self.scale).to(base.device)
        right = self.a[(*box[:-2], slice(None), columns)].to(base.device)
        total = torch.zeros((*left.shape[:-1], right.shape[-1]), device=base.device)
        for k in range(left.shape[-1]):  # a product and a sum are two operations: no compiler joins their roundings
            total += left[..., k, None] * right[..., k, None, :]
        total = (total.transpose(-1, -2) if self.is_transposed else total) + base.to(self.dtype).float()
        if self.row_factor is not None:
            factor = self.row_factor[rows].to(base.device)
            total = total * (factor if self.is_transposed else factor[:, None])
        return total.masked_fill(total.isnan(), math.nan)  # the bits of another NaN depend on the machine
