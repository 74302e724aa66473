"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns, masked_advantages, masked_log_ratio, ratio_of
from hybrid_rl.algos.inputs import LossInputs, PolicyLoss
from hybrid_rl.algos.masked import row_mean
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.options import key


@dataclass(frozen=True)
class GMPO(PolicyObjective):
    """Geometric-mean policy optimisation (arXiv:2507.20673), with the paper's bounds (e^-0.4, e^0.4)."""

    objective: Literal["gmpo"] = key("gmpo", "the policy loss")
    epsilon: float = key(0.4, "clip of the log ratio below 0", above=0)
    epsilon_high: float | None = key(None, "clip of the log ratio above 0; None = epsilon", above=0)
    is_per_completion = True

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        return geometric_mean_policy_loss(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            inputs.mask,
            inputs.rows,
            inputs.num_rows,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
        )


def geometric_mean_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    epsilon: float,
    epsilon_high: float,
    log_shift: Tensor | None = None,
) -> PolicyLoss:
    """-A * exp(mean over the completion's tokens of the clipped log ratio).

    GMPO, arXiv:2507.20673: tokens are clipped one by one and on one side, min(log ratio, epsilon_high) where
    A > 0 and max(log ratio, -epsilon) elsewhere, in log space. Every token has the value of its completion, so the
    token mean of a completion (loss_type "grpo") is the paper's. Where advantages differ between the tokens of a
    completion, which the paper does not have, each token is clipped by its own sign and has its own A in the value; in
    the gradient each gets the mean of all of them.

    logprobs, old_logprobs, advantages: float [T]; mask: bool [T]; rows: int64 [T], the sample of each token in
    0..num_rows-1, every sample whole; log_shift: float [T], a constant to add to the log ratio before the clip.
    Gradients flow through logprobs only. `weight` is the geometric mean of the unclipped ratios.
    """
    check_columns(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, rows=rows)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    if log_shift is not None:
        check_columns(logprobs=logprobs, log_shift=log_shift)
        log_ratio = log_ratio + torch.where(mask, log_shift.detach(), torch.zeros_like(log_shift))
    advantages = masked_advantages(advantages, mask)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=epsilon_high), log_ratio.clamp(min=-epsilon))
    mean = ratio_of(row_mean(clipped, mask, rows, num_rows)[rows])
    weight = ratio_of(row_mean(log_ratio, mask, rows, num_rows)[rows])
    detached = log_ratio.detach()
    return PolicyLoss(
        per_token=-advantages * mean,
        weight=weight,
        ratio=weight.detach(),
        clipped_low=(detached < -epsilon) & (advantages < 0),
        clipped_high=(detached > epsilon_high) & (advantages > 0),
    )
