"""Normalisation of what all ranks hold: exact, the same however samples lie on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.groups import power_of_two

VARIANCE_FLOOR = 1e-8  # TRL's, a standard deviation of 1e-4: rewards are of the order of 1


def whitened(values: Tensor, keep: Tensor, gather: Callable[[Any], list[Any]]) -> Tensor:
    """(value - mean) / sqrt(variance + 1e-8) over the kept values of all ranks; exactly 0 elsewhere, and everywhere
    where they are all equal or only one is kept.

    values: float64 [K]; keep: bool [K]; gather: the same call on every rank gives the values of all ranks. The variance
    is that of a sample (n - 1), as in TRL; it is taken around the global mean, in a second pass, because a difference
    of sums of squares would lose the digits that matter.
    """
    if values.dim() != 1 or keep.shape != values.shape:
        raise ValueError(f"values and keep must be [K], not {tuple(values.shape)} and {tuple(keep.shape)}")
    kept = values[keep].to(torch.float64)
    low, high = (float(kept.min()), float(kept.max())) if len(kept) else (math.inf, -math.inf)
    counts, sums, lows, highs = zip(*gather((len(kept), float(kept.sum()), low, high)), strict=True)
    count = sum(counts)
    mean = math.fsum(sums) / max(count, 1)
    # What is squared is of the order of 1 (`power_of_two`): squares of 1e154 and more are not float64.
    unit = float(power_of_two(torch.tensor(max(highs) - min(lows) if count else 1.0, dtype=torch.float64)))
    squares = math.fsum(gather(float((((kept - mean) / unit) ** 2).sum())))
    if count < 2 or min(lows) == max(highs):
        return torch.zeros_like(values, dtype=torch.float64)
    deviation = unit * math.sqrt(squares / (count - 1) + VARIANCE_FLOOR / unit / unit)
    return torch.where(keep, (values.to(torch.float64) - mean) / deviation, 0.0)
