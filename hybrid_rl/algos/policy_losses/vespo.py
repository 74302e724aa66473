"""VESPO: a smooth kernel on the importance weight of the whole completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns, masked_advantages, masked_log_ratio, ratio_of
from hybrid_rl.algos.inputs import LossInputs, PolicyLoss
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.options import key


@dataclass(frozen=True)
class VESPO(PolicyObjective):
    """Variational sequence-level soft policy optimisation (arXiv:2602.10693), with the constants of its authors.

    The weight is against the old policy. The paper's is against the policy that made the completion: that is
    old_logprobs=rollout.
    """

    objective: Literal["vespo"] = key("vespo", "the policy loss")
    vespo_k_pos: float = key(2.0, "positive advantages: how fast small weights vanish", minimum=0)
    vespo_lambda_pos: float = key(3.0, "positive advantages: how fast large weights vanish", minimum=0)
    vespo_k_neg: float = key(3.0, "negative advantages: how fast small weights vanish", minimum=0)
    vespo_lambda_neg: float = key(2.0, "negative advantages: how fast large weights vanish", minimum=0)

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        return gamma_kernel_policy_loss(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            inputs.mask,
            inputs.rows,
            inputs.num_rows,
            k_pos=self.vespo_k_pos,
            lambda_pos=self.vespo_lambda_pos,
            k_neg=self.vespo_k_neg,
            lambda_neg=self.vespo_lambda_neg,
        )


def gamma_kernel_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> PolicyLoss:
    """-sg(W^k * exp(lambda * (1 - W))) * A * ln p, W = product over the completion's tokens of p / p_old.

    VESPO, arXiv:2602.10693, section 3.4. W is the importance weight of the completion, with no division by its length;
    k_pos and lambda_pos are meant where A >= 0, k_neg and lambda_neg elsewhere. The kernel is 1 at W = 1. It is
    computed from ln W in float64 and needs no bounds on W: it vanishes where W overflows or underflows. Where lambda is
    0 it does not; it is at most e^20 (`ratio_of`).

    logprobs, old_logprobs, advantages: float [T]; mask: bool [T]; rows: int64 [T], the sample of each token in
    0..num_rows-1, every sample whole. Gradients flow through ln p only. `weight` is the ratio of each token.
    """
    check_columns(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, rows=rows)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    # e^700 is a float64, and 0 times it a number.
    log_weight = row_sum(log_ratio.detach().double(), rows, num_rows)[rows].clamp(max=700)
    advantages = masked_advantages(advantages, mask)
    is_positive = advantages >= 0
    k = torch.full_like(log_weight, k_neg).masked_fill(is_positive, k_pos)
    decay = torch.full_like(log_weight, lambda_neg).masked_fill(is_positive, lambda_pos)
    kernel = ratio_of(k * log_weight - decay * torch.expm1(log_weight)).to(logprobs.dtype)
    per_token = -kernel * advantages * torch.where(mask, logprobs, torch.zeros_like(logprobs))
    metrics = {"vespo/kernel": kernel, "vespo/log_weight": log_weight.to(logprobs.dtype)}
    return PolicyLoss.unclipped(per_token, ratio_of(log_ratio), metrics)
