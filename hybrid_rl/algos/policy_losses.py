"""Policy-gradient losses, per token. Aggregation is a matter of token weights (masked.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algos.masked import row_mean


@dataclass(frozen=True)
class PolicyLoss:
    """per_token: float [T], the loss before weighting. weight: float [T], policy / old at the level of the loss (token
    or sequence), with its gradient; ratio: the same, detached. clipped_low, clipped_high: bool [T]. per_sample: all
    tokens of a sample share one ratio, so that shares of what was clipped count samples."""

    per_token: Tensor
    weight: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    per_sample: bool = False


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    importance_sampling_level: str = "token",
) -> PolicyLoss:
    """PPO's clipped surrogate: -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A).

    PPO, arXiv:1707.06347, eq. 7; asymmetric bounds from DAPO, arXiv:2503.14476, eq. 10; `delta` also bounds the
    unclipped ratio from above (two-sided clipping, INTELLECT-2, arXiv:2505.07291, eq. 1).
    importance_sampling_level="sequence" takes one ratio per completion, exp(mean over its tokens of ln p - ln p_old)
    (GSPO, arXiv:2507.18071, eq. 7).

    logprobs, old_logprobs, advantages: float [T]; mask: bool [T]; rows: int64 [T], the sample of each token in
    0..num_rows-1, every sample whole. Gradients flow through logprobs only.
    """
    shapes = {tuple(t.shape) for t in (logprobs, old_logprobs, advantages, mask, rows)}
    if len(shapes) != 1 or logprobs.dim() != 1:
        raise ValueError(f"logprobs, old_logprobs, advantages, mask and rows must all be [T], not {sorted(shapes)}")
    # torch.where: where the mask is off an overflow of exp would reach the gradient as 0 * inf.
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), torch.zeros_like(logprobs))
    if importance_sampling_level == "sequence":
        log_ratio = row_mean(log_ratio, mask, rows, num_rows)[rows]
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level={importance_sampling_level!r} is unknown; use token or sequence")
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    advantages = advantages.detach()
    per_token = -torch.minimum(unclipped * advantages, bounded * advantages)
    detached = ratio.detach()
    return PolicyLoss(
        per_token=per_token,
        weight=ratio,
        ratio=detached,
        clipped_low=(detached < 1 - epsilon) & (advantages < 0),
        clipped_high=(detached > 1 + epsilon_high) & (advantages > 0),
        per_sample=importance_sampling_level == "sequence",
    )
