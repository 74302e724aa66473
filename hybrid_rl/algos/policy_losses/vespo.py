"""VESPO: a smooth kernel on the importance weight of the whole completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, PolicyObjective, register
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.options import key


@register
@dataclass(frozen=True)
class VESPO(PolicyObjective):
    """Variational sequence-level soft policy optimisation: `-sg(W^k exp(lambda (1 - W))) A ln p`, W = product over the
    completion's tokens of p / p_old.

    arXiv:2602.10693, section 3.4, with the constants of its authors: k and lambda of their own for A >= 0 and for the
    rest. W is not divided by the length. The paper's W is against the policy that made the completion: that is
    `old_logprobs=rollout`, as the preset has it. The kernel is 1 at W = 1; it is computed from ln W in float64 and
    needs no bounds on W, as it vanishes where W overflows or underflows. With lambda = 0 it does not: it is at most
    e^20.
    """

    objective: Literal["vespo"] = key("vespo", "the policy loss")
    vespo_k_pos: float = key(2.0, "positive advantages: how fast small weights vanish", minimum=0)
    vespo_lambda_pos: float = key(3.0, "positive advantages: how fast large weights vanish", minimum=0)
    vespo_k_neg: float = key(3.0, "negative advantages: how fast small weights vanish", minimum=0)
    vespo_lambda_neg: float = key(2.0, "negative advantages: how fast large weights vanish", minimum=0)

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """The log-likelihood, weighted by kernel and advantage. `weight` is the ratio of each token."""
        log_ratio, dtype = inputs.log_ratio, inputs.logprobs.dtype
        # e^700 is a float64, and 0 times it a number.
        log_weight = row_sum(log_ratio.detach().double(), inputs.rows, inputs.num_rows)[inputs.rows].clamp(max=700)
        advantages = inputs.kept(inputs.advantages.detach())
        is_positive = advantages >= 0
        k = torch.full_like(log_weight, self.vespo_k_neg).masked_fill(is_positive, self.vespo_k_pos)
        decay = torch.full_like(log_weight, self.vespo_lambda_neg).masked_fill(is_positive, self.vespo_lambda_pos)
        kernel = ratio_of(k * log_weight - decay * torch.expm1(log_weight)).to(dtype)
        metrics = {"vespo/kernel": kernel, "vespo/log_weight": log_weight.to(dtype)}
        return PolicyLoss.unclipped(-kernel * advantages * inputs.kept(inputs.logprobs), ratio_of(log_ratio), metrics)
