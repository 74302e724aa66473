"""Boxes of changed tensors of every kind: with experts, turned, with row factors, with infinite elements and NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_rl.resharding.handoff.merged import Merge
from hybrid_rl.weights.low_rank import LowRank

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = {
    "rows": lambda shape, dtype: torch.full(shape, 7.0, dtype=dtype),
    "columns": lambda shape, dtype: torch.full([*shape[:-2], shape[-1], shape[-2]], 7.0, dtype=dtype).transpose(-1, -2),
    "gaps": lambda shape, dtype: torch.full([*shape[:-1], 2 * shape[-1] + 3], 7.0, dtype=dtype)[..., 1:-2:2],
}
# experts, out, in, rank: shorter and longer than the vectors, panels and tiles of the operators.
EXTENTS = [(0, 7, 33, 3), (0, 130, 600, 18), (3, 9, 20, 4), (0, 1, 1, 1), (2, 5, 515, 1)]


def boxes_of(dtype: torch.dtype, layout: str) -> list[Merge]:
    """Boxes to be written in a dtype and a layout, from bases of each dtype and in place. The same at every call."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    boxes = []
    for experts, out, into, rank in EXTENTS:
        for is_transposed in (False, True):
            lead = (experts,) if experts else ()
            factor = None if experts else drawn(out)
            change = LowRank(drawn(*lead, rank, into), drawn(*lead, out, rank), 0.37, is_transposed, factor)
            box = tuple(slice(extent // 4, max(extent // 4 + 1, extent - extent // 5)) for extent in change.shape)
            for base_dtype in FLOATS:
                base = drawn(*change.shape).to(base_dtype)[box]
                base[(0,) * base.dim()] = torch.nan if base_dtype is dtype else torch.inf
                boxes.append(Merge.of(change.ready(base.device), base, LAYOUTS[layout](base.shape, dtype), box))
                if base_dtype is dtype:
                    copy = LAYOUTS[layout](base.shape, dtype).copy_(base)
                    boxes.append(Merge.of(change.ready(base.device), copy, copy, box))
    return boxes


def contents(boxes: Sequence[Merge]) -> Tensor:
    """All that lies in the memory of the targets, between their elements too."""
    memory = [box.target.untyped_storage() for box in boxes]
    return torch.cat([torch.tensor([], dtype=torch.uint8).set_(storage) for storage in memory])
