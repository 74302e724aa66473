"""What every policy loss does with its columns first: their shapes, and the ratio where the mask is off."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_rl.algos.inputs import PolicyLoss


def check_columns(**columns: Tensor) -> None:
    """Raises ValueError unless all columns are [T], one number per token."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"{', '.join(shapes)} must all be [T], one number per token, not {shapes}")


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """ln of policy / old policy, [T] with gradient through logprobs; 0 where masked: an overflow of exp there would
    reach the gradient as 0 * inf."""
    return torch.where(mask, logprobs - old_logprobs.detach(), torch.zeros_like(logprobs))


def unclipped(per_token: Tensor, weight: Tensor, metrics: Mapping[str, Tensor] | None = None) -> PolicyLoss:
    """The loss of an objective that stops no gradient. per_token, weight: float [T]."""
    nothing = torch.zeros_like(per_token, dtype=torch.bool)
    return PolicyLoss(
        per_token=per_token,
        weight=weight,
        ratio=weight.detach(),
        clipped_low=nothing,
        clipped_high=nothing,
        metrics=dict(metrics or {}),
    )
