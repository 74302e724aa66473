"""CISPO: the importance weight is clipped, the gradient of no token is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns, masked_advantages, masked_log_ratio, ratio_of
from hybrid_rl.algos.inputs import LossInputs, PolicyLoss
from hybrid_rl.algos.policy_losses.levels import at_level
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.options import key


@dataclass(frozen=True)
class CISPO(PolicyObjective):
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv:2506.13585). The paper gives no bounds; those
    here are of ScaleRL (arXiv:2510.13786): weights of at most 5, no lower bound."""

    objective: Literal["cispo"] = key("cispo", "the policy loss")
    epsilon: float | None = key(None, "weights are at least 1 - this; None = no lower bound", above=0, maximum=1)
    epsilon_high: float = key(4.0, "weights are at most 1 + this (TRL gives the bound itself: 5)", above=0)

    importance_sampling_level: Literal["token", "sequence"] = key(
        "token", "sequence = the weight of a completion, the geometric mean over its tokens, stands at each of them"
    )

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        return cispo_policy_loss(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            inputs.mask,
            inputs.rows,
            inputs.num_rows,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            importance_sampling_level=self.importance_sampling_level,
        )


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    epsilon: float | None,
    epsilon_high: float,
    importance_sampling_level: str = "token",
) -> PolicyLoss:
    """-sg(clip(ratio, 1 - epsilon, 1 + epsilon_high)) * A * ln p (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    The clipped ratio is detached: it weighs the gradient of ln p, which no token loses. epsilon=None: no lower bound.
    importance_sampling_level: whose ratio it is, see `at_level`; with "sequence", as in TRL, a token keeps its own
    advantage and ln p. logprobs, old_logprobs, advantages: float [T]; mask: bool [T]; rows: int64 [T], in
    0..num_rows-1. Gradients flow through logprobs only.
    """
    check_columns(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, rows=rows)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = ratio_of(at_level(log_ratio, mask, rows, num_rows, importance_sampling_level))
    detached = ratio.detach()
    weight = detached.clamp(min=0.0 if epsilon is None else 1 - epsilon, max=1 + epsilon_high)
    logprobs = torch.where(mask, logprobs, torch.zeros_like(logprobs))
    per_token = -weight * masked_advantages(advantages, mask) * logprobs
    return PolicyLoss.unclipped(per_token, ratio, {"cispo_clip_ratio": (weight != detached).float()})
