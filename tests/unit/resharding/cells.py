"""The part of a tensor that a rank holds, by the layout."""

from __future__ import annotations

import numpy as np

from hybrid_rl.resharding.layout import ShardedTensor
from hybrid_rl.weights.boxes import Box


def cell_of(tensor: ShardedTensor, rank: int) -> Box | None:
    """Return the box of the global tensor that a rank holds; None if it holds nothing."""
    found = np.argwhere(tensor.owners == rank)
    if not len(found):
        return None
    return tuple(slice(cuts[i], cuts[i + 1]) for cuts, i in zip(tensor.cuts, found[0].tolist(), strict=False))
