"""The sampling temperature of a batch."""

from __future__ import annotations

import math

from hybrid_rl.batch.ref import AnyBatch
from hybrid_rl.errors import DataError


def sampling_temperature(batch: AnyBatch) -> float:
    """Read the temperature that all samples of a batch were made at, and that their logprobs are computed with.

    Raises DataError for a batch without the column `temperature`, without a sample, of several temperatures (one
    forward pass divides all logits by one number), or of one that is not positive.
    """
    if "temperature" not in batch:
        raise DataError(
            "the batch has no column temperature, so the distribution that its samples come from is not known; older "
            "versions saved none. If you know it, load the batch, add the column and save it again: "
            "batch.with_columns(temperature=torch.full((batch.num_samples,), 1.0, dtype=torch.float64))"
        )
    temperatures = batch["temperature"].unique().tolist()
    if len(temperatures) != 1:
        raise DataError(f"the samples of a batch were made at the temperatures {temperatures}; train on one at a time")
    if not 0 < temperatures[0] < math.inf:
        raise DataError(
            f"the samples of a batch were made at the temperature {temperatures[0]}; logits are divided by it, so "
            "train on samples of a positive one"
        )
    return float(temperatures[0])
