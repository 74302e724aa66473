"""Comparison of batches."""

from __future__ import annotations

import math
from typing import Any

import torch

from hybrid_rl.batch import Batch, Jagged


def assert_same(mine: Batch, theirs: Batch) -> None:
    """Column by column, bit by bit, dtypes and types included, NaN equal to NaN. Their order does not matter."""
    assert set(mine) == set(theirs) and mine.num_samples == theirs.num_samples
    for name, column in mine.items():
        other = theirs[name]
        if isinstance(column, Jagged):
            assert torch.equal(column.offsets, other.offsets)
            column, other = column.values, other.values
        assert bits(column) == bits(other) if isinstance(column, torch.Tensor) else same(column, other), name


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """The content of a tensor."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Whether two values that JSON can hold are equal in value and type, NaN equal to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))
