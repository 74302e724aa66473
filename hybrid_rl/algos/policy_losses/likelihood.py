"""Losses that weigh the gradient of ln p by a constant: REINFORCE, CISPO and VESPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, PolicyObjective, own, register
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.options import key
from hybrid_rl.algos.policy_losses.clip import log_ratio_at


@register
@dataclass(frozen=True)
class Reinforce(PolicyObjective):
    """REINFORCE: `-A ln p` (Williams, 1992), the gradient of the expected advantage if the policy itself made the
    tokens.

    With advantage 1 for the samples to imitate it is supervised learning (SFT, rejection sampling). The ratio to the
    old policy is reported and takes no part.
    """

    objective: Literal["reinforce"] = key("reinforce", "the policy loss")
    follows_advantages = True

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the log-likelihood, weighted by the advantage."""
        advantages = inputs.kept(inputs.advantages.detach())
        return PolicyLoss.unclipped(-advantages * inputs.kept(inputs.logprobs), ratio_of(inputs.log_ratio))


@register
@dataclass(frozen=True)
class CISPO(PolicyObjective):
    """Clipped importance sampling policy optimisation: `-sg(clip(w, 1 - epsilon, 1 + epsilon_high)) A ln p`.

    MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5: the clipped w is detached and weighs the gradient of ln p, which no
    token loses. The paper gives no bounds; those here are of ScaleRL (arXiv:2510.13786): weights of at most 5, no lower
    bound. With `importance_sampling_level=sequence`, as in TRL, a token keeps its own advantage and ln p.
    """

    objective: Literal["cispo"] = key("cispo", "the policy loss")
    follows_advantages = True
    epsilon: float | None = key(None, "weights are at least 1 - this; None = no lower bound", above=0, maximum=1)
    epsilon_high: float = key(4.0, "weights are at most 1 + this (TRL gives the bound itself: 5)", above=0)
    importance_sampling_level: Literal["token", "sequence"] = key(
        "token", "sequence = the weight of a completion, the geometric mean over its tokens, for each of them"
    )

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the weighted log-likelihood; the metric is the share of tokens whose weight was clipped."""
        ratio = ratio_of(log_ratio_at(inputs, self.importance_sampling_level))
        detached = ratio.detach()
        weight = detached.clamp(min=0.0 if self.epsilon is None else 1 - self.epsilon, max=1 + self.epsilon_high)
        per_token = -weight * inputs.kept(inputs.advantages.detach()) * inputs.kept(inputs.logprobs)
        return PolicyLoss.unclipped(per_token, ratio, {"cispo_clip_ratio": (weight != detached).float()})


@register
@dataclass(frozen=True)
class VESPO(PolicyObjective):
    """Variational sequence-level soft policy optimisation: `-sg(W^k exp(lambda (1 - W))) A ln p`, W = product over the
    completion's tokens of p / p_old.

    arXiv:2602.10693, section 3.4, with the constants of its authors: separate k and lambda for A >= 0 and for the
    rest. W is not divided by the length. The paper's W is against the policy that made the completion: that is
    `old_logprobs=rollout`, as the preset has it. The kernel is 1 at W = 1; it is computed from ln W in float64 and
    needs no bounds on W, as it vanishes if W overflows or underflows. With lambda = 0 it does not: it is at most
    e^20.
    """

    objective: Literal["vespo"] = key("vespo", "the policy loss")
    follows_advantages = True
    vespo_k_pos: float = own(2.0, "positive advantages: how fast small weights vanish", minimum=0)
    vespo_lambda_pos: float = own(3.0, "positive advantages: how fast large weights vanish", minimum=0)
    vespo_k_neg: float = own(3.0, "negative advantages: how fast small weights vanish", minimum=0)
    vespo_lambda_neg: float = own(2.0, "negative advantages: how fast large weights vanish", minimum=0)

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the log-likelihood, weighted by kernel and advantage. `weight` is the ratio of each token."""
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
