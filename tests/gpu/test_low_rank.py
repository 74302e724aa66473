"""Adapters merged on the device: against the bits of the PyTorch form on the CPU, boxes of every kind in one launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_rl.compat import native
from hybrid_rl.resharding.handoff.merged import Merge, carry_out
from tests.gpu.device import DEVICE, cuda_only
from tests.unit.resharding.boxes import FLOATS, LAYOUTS, boxes_of

pytestmark = cuda_only


def on_device(box: Merge) -> Merge:
    """The same box there, of the same strides; in place if it was."""
    target = torch.empty_strided(box.target.shape, box.target.stride(), dtype=box.target.dtype, device=DEVICE)
    target.copy_(box.target)
    base = target if box.base is box.target else box.base.to(DEVICE)
    return replace(box, change=box.change.ready(target.device), base=base, target=target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_bits_are_those_of_the_cpu(dtype: torch.dtype, layout: str) -> None:
    assert native.operator("low_rank_merge", "cuda") is not None
    boxes = [on_device(box) for box in boxes_of(dtype, layout)]
    wanted = boxes_of(dtype, layout)
    carry_out(boxes)
    carry_out(wanted)
    found, expected = (torch.cat([box.target.flatten().cpu() for box in all_of]) for all_of in (boxes, wanted))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
