"""CISPO: the importance weight is clipped, the gradient of no token is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns, masked_advantages, masked_log_ratio, ratio_of
from hybrid_rl.algos.inputs import LossInputs, PolicyLoss
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.options import key


@dataclass(frozen=True)
class CISPO(PolicyObjective):
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv:2506.13585). The paper gives no bounds; those
    here are of ScaleRL (arXiv:2510.13786): weights of at most 5, no lower bound."""

    objective: Literal["cispo"] = key("cispo", "the policy loss")
    epsilon: float | None = key(None, "weights are at least 1 - this; None = no lower bound", above=0, maximum=1)
    epsilon_high: float = key(4.0, "weights are at most 1 + this (TRL gives the bound itself: 5)", above=0)

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        return cispo_policy_loss(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            inputs.mask,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
        )


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float | None,
    epsilon_high: float,
) -> PolicyLoss:
    """-sg(clip(ratio, 1 - epsilon, 1 + epsilon_high)) * A * ln p (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    The clipped ratio is detached: it weighs the gradient of ln p, which no token loses. epsilon=None: no lower bound.
    logprobs, old_logprobs, advantages: float [T]; mask: bool [T]. Gradients flow through logprobs only.
    """
    check_columns(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    ratio = ratio_of(masked_log_ratio(logprobs, old_logprobs, mask))
    detached = ratio.detach()
    weight = detached.clamp(min=0.0 if epsilon is None else 1 - epsilon, max=1 + epsilon_high)
    logprobs = torch.where(mask, logprobs, torch.zeros_like(logprobs))
    per_token = -weight * masked_advantages(advantages, mask) * logprobs
    return PolicyLoss.unclipped(per_token, ratio, {"cispo_clip_ratio": (weight != detached).float()})
