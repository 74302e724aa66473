"""The reason why an update was skipped: which of its numbers were not finite, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_rl.batch import Batch, Jagged


@dataclass(frozen=True)
class SkippedUpdate:
    """One rank's part, or what `joined` makes of those of all. norm: of the gradients; loss: of the mini-batch;
    gradients, weights: parameters that are not finite, in the order of the model, of num_parameters; columns: of the
    batch, by name, tokens in the loss that are not finite, and all of them."""

    norm: float
    loss: float
    gradients: Sequence[str]
    weights: Sequence[str]
    num_parameters: int
    columns: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[SkippedUpdate], order: Sequence[str]) -> SkippedUpdate:
        """Join the parts of all ranks. order: the names of all parameters."""
        columns: dict[str, tuple[int, int]] = {}
        for part in parts:
            for name, (bad, total) in part.columns.items():
                before = columns.get(name, (0, 0))
                columns[name] = before[0] + bad, before[1] + total
        gradients, weights = ({name for part in parts for name in getattr(part, of)} for of in ("gradients", "weights"))
        return cls(
            parts[0].norm,
            sum(part.loss for part in parts),
            [name for name in order if name in gradients],
            [name for name in order if name in weights],
            len(order),
            columns,
        )

    def __str__(self) -> str:
        findings = [f"the gradient norm was {self.norm}"]
        if self.weights:
            findings.append(
                f"{len(self.weights)} of {self.num_parameters} weights are not finite, first {self.weights[0]}"
            )
        findings += [
            f"{bad} of {total} tokens have {name} that are not finite"
            for name, (bad, total) in self.columns.items()
            if bad
        ]
        findings.append(f"the loss was {self.loss:.6g}")
        if self.gradients:
            findings.append(
                f"the gradients of {len(self.gradients)} of {self.num_parameters} parameters are not finite, first "
                f"that of {self.gradients[0]}"
            )
        elif not self.weights:
            findings.append("each gradient is finite, their squares are too large for float32")
        return "; ".join(findings)

    @property
    def remedy(self) -> str:
        """What the user can do."""
        if self.weights:
            return "continue from an earlier checkpoint, with a lower learning_rate"
        if self.columns.get("advantages", (0, 0))[0] or self.columns.get("returns", (0, 0))[0]:
            return "look at the rewards: they are too large, or not finite"
        if any(bad for bad, _ in self.columns.values()):
            return "look at the models that gave those logprobs or values, and at what the samples are"
        if not math.isfinite(self.loss):
            return "look at the samples (samples.jsonl): a ratio or a KL term may overflow; lower learning_rate"
        return "lower learning_rate, look at rewards of extreme size, or use dtype=float32"


def columns_not_finite(batch: Batch, mask: Tensor) -> dict[str, tuple[int, int]]:
    """Count, for each column of numbers per token, those that are not finite among the tokens of a bool mask [M]."""
    counts = {}
    for name in batch:
        column = batch[name]
        if isinstance(column, Jagged) and column.values.is_floating_point() and column.values.shape == mask.shape:
            bad = int((~torch.isfinite(column.values) & mask).sum())
            if bad:
                counts[name] = bad, int(mask.sum())
    return counts
