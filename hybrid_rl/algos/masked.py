"""Sums over the tokens of packed samples, the weight of each token in the loss, the tokens that the policy loss leaves
out, and the weight of the entropy bonus.

Every loss here is `sum(weight * per_token)`, with weights that are fixed for a whole mini-batch from *global* counts
before it is cut. How it is cut into micro-batches or over ranks then cannot change the loss or its gradient. Tokens
that the policy loss leaves out still count in its denominators, as in TRL, and still pay a KL penalty in the loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hybrid_rl.algos.columns import at_least_float32, check_columns

if TYPE_CHECKING:
    from torch import Tensor


def row_sum(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Sum `values` [T] per sample, [num_rows], in their dtype, of float16 and bfloat16 in float32. rows: int64 [T],
    the sample of each token."""
    values = at_least_float32(values)
    return values.new_zeros(num_rows).index_add_(0, rows, values)


def take(values: Tensor, rows: Tensor) -> Tensor:
    """Return values[rows], [T, ...] of `values` [N, ...] and rows int64 [T]. Its gradient has the same bits every time,
    however often a row is taken: on the CPU that of indexing adds up in any order if several threads run, on GPUs that
    of `index_select`."""
    return values.index_select(0, rows) if values.device.type == "cpu" else values[rows]


def row_mean(values: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Average `values` [T] over the tokens of each sample that are in the mask, bool [T]: [num_rows]; 0 for a sample
    without any. In their dtype, of float16 and bfloat16 in float32. rows: int64 [T]."""
    check_columns(values=values, mask=mask, rows=rows)
    values = at_least_float32(values)
    weight = mask.to(values.dtype)
    # torch.where, not a product: a masked value may be inf or NaN.
    total = row_sum(torch.where(mask, values, torch.zeros_like(values)), rows, num_rows)
    return total / row_sum(weight, rows, num_rows).clamp(min=1)


def token_weights(
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    loss_type: str,
    *,
    num_tokens: int,
    num_trajectories: int,
    max_completion_length: int,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute the weight of each token in the loss, float32 [T]; 0 where masked.

    mask: bool [T]; rows: int64 [T]; num_tokens and num_trajectories: unmasked tokens and scored trajectories of the
    whole mini-batch over all ranks. One whose tokens are all masked still counts in num_trajectories, as in TRL.
    lengths: int64 [num_rows], unmasked tokens of each sample's trajectory; None if every sample is one.

    - "dapo": 1 / num_tokens (DAPO, arXiv:2503.14476, eq. 12)
    - "grpo": 1 / (num_trajectories * tokens of the trajectory) (DeepSeekMath, arXiv:2402.03300, eq. 3)
    - "dr_grpo": 1 / (num_trajectories * max_completion_length) (Dr. GRPO, arXiv:2503.20783)
    - "sequence_sum": 1 / num_trajectories, the mean over trajectories of the sum over their tokens (with a
      sequence-level loss LUSPO's, arXiv:2602.05261)

    So a trajectory weighs the same whether its turns are one sample or several. Raises ValueError for an unknown
    loss_type, negative counts, and a max_completion_length below 1 if it counts.
    """
    check_columns(mask=mask, rows=rows)
    if num_tokens < 0 or num_trajectories < 0:
        raise ValueError(f"num_tokens={num_tokens} and num_trajectories={num_trajectories} are counts; give 0 or more")
    if loss_type == "dr_grpo" and max_completion_length < 1:
        raise ValueError(f"max_completion_length={max_completion_length} is what dr_grpo divides by; give 1 or more")
    on = mask.to(torch.float32)
    if loss_type == "dapo":
        return on / max(num_tokens, 1)
    if loss_type == "grpo":
        sizes = row_sum(on, rows, num_rows) if lengths is None else lengths.to(torch.float32)
        return on / sizes.clamp(min=1)[rows] / max(num_trajectories, 1)
    if loss_type == "dr_grpo":
        return on / (max(num_trajectories, 1) * max_completion_length)
    if loss_type == "sequence_sum":
        return on / max(num_trajectories, 1)
    raise ValueError(f"loss_type={loss_type!r} is unknown; use dapo, grpo, dr_grpo or sequence_sum")


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
    """Return the tokens that off-policy sequence masking keeps, bool [T] (DeepSeek-V3.2, arXiv:2512.02556; TRL's
    `get_off_policy_mask`).

    A token is left out if its advantage is negative and the mean over its completion of ln p_rollout - ln p, an
    estimate of KL(engine, policy) per token, is above `threshold` (or not a number). p is the policy as it is now, so
    that both the engine's numerics and the updates since count. logprobs, rollout_logprobs, advantages: float [T];
    mask: bool [T]; rows: int64 [T].
    """
    check_columns(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, mask=mask, rows=rows)
    gap = at_least_float32(rollout_logprobs.detach()) - logprobs.detach()
    is_near = row_mean(gap, mask, rows, num_rows) <= threshold
    return (advantages >= 0) | is_near[rows]


def entropy_quantile(entropy: Tensor, mask: Tensor, share: float, *, num_tokens: int) -> Tensor:
    """Return the quantile 1 - share of the entropies of the tokens in the mask, linear between neighbours, float64 [];
    -inf if there are none. Tokens of at least this entropy are the `share` with the most (S. Wang et al., "Beyond the
    80/20 rule", arXiv:2506.01939; TRL's `get_high_entropy_mask`).

    entropy: float [T]; mask: bool [T]; share: 0 to 1; num_tokens: how many are True, so that none need be counted on a
    device.
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
    """Return the weight of an entropy bonus after an optimizer step: up by `delta` to at most `high` if the mean
    entropy of a token is at most `target`, else down by it to at least `low` (Skywork-OR1, arXiv:2505.22312; the bounds
    are those of TRL's use_adaptive_entropy). An entropy that is not a number counts as above it."""
    return min(coef + delta, high) if measured <= target else max(coef - delta, low)
