"""Tokens of a mini-batch that are left out of the policy loss, and the weight of the entropy bonus. What is left out
here still counts in the denominators, as in TRL, and still pays a KL penalty in the loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_rl.algos.columns import at_least_float32, check_columns
from hybrid_rl.algos.masked import row_mean


def off_policy_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    threshold: float,
) -> Tensor:
    """Tokens that off-policy sequence masking keeps, bool [T] (DeepSeek-V3.2, arXiv:2512.02556; TRL's
    `get_off_policy_mask`).

    A token is left out where its advantage is negative and the mean over its completion of ln p_rollout - ln p, an
    estimate of KL(engine, policy) per token, is above `threshold` (or not a number). p is the policy as it is now, so
    that both the engine's numerics and the updates since count. logprobs, rollout_logprobs, advantages: float [T];
    mask: bool [T]; rows: int64 [T].
    """
    check_columns(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, mask=mask, rows=rows)
    gap = at_least_float32(rollout_logprobs.detach()) - logprobs.detach()
    is_near = row_mean(gap, mask, rows, num_rows) <= threshold
    return (advantages >= 0) | is_near[rows]


def entropy_quantile(entropy: Tensor, mask: Tensor, share: float, *, num_tokens: int) -> Tensor:
    """The quantile 1 - share of the entropies where mask is True, linear between neighbours, float64 []; -inf without
    any. Those that are at least so large are the `share` of tokens with the most entropy (S. Wang et al., "Beyond the
    80/20 rule", arXiv:2506.01939; TRL's `get_high_entropy_mask`).

    entropy: float [T]; mask: bool [T]; num_tokens: how many are True, so that none need be counted on a device.
    """
    check_columns(entropy=entropy, mask=mask)
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} is not a share of tokens; use 0 to 1")
    values = entropy.detach().double()
    if not num_tokens:
        return values.new_tensor(-math.inf)
    ordered = torch.where(mask, values, torch.inf).sort().values
    place = (1 - share) * (num_tokens - 1)
    low = math.floor(place)
    below, above = ordered[low], ordered[min(low + 1, num_tokens - 1)]
    return below + (above - below) * (place - low)


def next_entropy_coef(coef: float, measured: float, *, target: float, low: float, high: float, delta: float) -> float:
    """The weight of an entropy bonus after an optimizer step: up by `delta` to at most `high` if the mean entropy of
    a token is at most `target`, else down by it to at least `low` (Skywork-OR1, arXiv:2505.22312; the bounds are those
    of TRL's use_adaptive_entropy). An entropy that is not a number counts as above it."""
    return min(coef + delta, high) if measured <= target else max(coef - delta, low)
