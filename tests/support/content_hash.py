"""The content hash of a single view, by the operator that hashes boxes for the proof of a handoff."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.resharding.copy_tables import MAX_DIMS, Column
from hybrid_rl.resharding.execute import HashedBoxes, hash_pieces


def content_hash(
    view: Tensor,
    seed: int,
    global_offset: int,
    global_strides: Sequence[int],
    dtype: torch.dtype | None = None,
) -> int:
    """Return the content hash of a view of at most MAX_DIMS dims, as a part of a global tensor; int64.

    global_offset: element number of its first element; global_strides: step in element numbers along each dim.
    dtype: the one whose bits are hashed; the view's own if None.
    """
    zero = np.zeros(1, dtype=np.int64)
    boxes = HashedBoxes(
        tensor=zero,
        offset=zero,
        strides=_row(view.stride(), 0),
        shape=_row(view.shape, 1),
        dtype=zero,
        parameter=zero,
        global_offset=zero + global_offset,
        global_strides=_row(global_strides, 0),
    )
    hashes = torch.zeros(1, dtype=torch.int64, device=view.device)
    seeds = torch.tensor([seed], dtype=torch.int64)
    hash_pieces(boxes, [view], [view.dtype if dtype is None else dtype], hashes=hashes, seeds=seeds)
    return int(hashes)


def _row(values: Sequence[int], fill: int) -> Column:
    return np.array([[*values, *[fill] * (MAX_DIMS - len(values))]], dtype=np.int64)
