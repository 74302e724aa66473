"""Low-rank changes of weights: what adapters add to the tensors of a model, box by box.

The sum of a box has the same bits wherever and in whatever boxes it is computed: products and sums are rounded to
float32 one by one, in the order of the rank, so a sharded trainer and a tensor-parallel engine agree to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.tensors.boxes import Box


@dataclass(frozen=True)
class LowRank:
    """The change of one tensor: W + scale * B A, of fused experts one product each.

    a: float32 [r, in] or [experts, r, in]; b: float32 [out, r] or [experts, out, r]; is_transposed: whether the tensor
    is stored as [in, out] (experts of some families). row_factor: float32 [out], by which the sum is multiplied (DoRA:
    magnitude over norm); None = 1. The same object on all ranks.
    """

    a: Tensor
    b: Tensor
    scale: float
    is_transposed: bool = False
    row_factor: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that is changed."""
        experts, out, into = self.b.shape[:-2], self.b.shape[-2], self.a.shape[-1]
        return (*experts, into, out) if self.is_transposed else (*experts, out, into)

    def merged(self, base: Tensor, box: Box) -> Tensor:
        """Return a box of the changed tensor, float32. base: that box of the unchanged one, any float dtype."""
        rows, columns = (box[-1], box[-2]) if self.is_transposed else (box[-2], box[-1])
        left = (self.b[(*box[:-2], rows)] * self.scale).to(base.device)
        right = self.a[(*box[:-2], slice(None), columns)].to(base.device)
        total = torch.zeros((*left.shape[:-1], right.shape[-1]), device=base.device)
        for k in range(left.shape[-1]):  # a product and a sum are two operations: no compiler joins their roundings
            total += left[..., k, None] * right[..., k, None, :]
        total = (total.transpose(-1, -2) if self.is_transposed else total) + base.float()
        if self.row_factor is not None:
            total = total * self.row_factor[rows].to(base.device)[:, None]
        return total
