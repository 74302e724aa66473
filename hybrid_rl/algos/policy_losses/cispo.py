"""CISPO: the importance weight is clipped, the gradient of no token is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, PolicyObjective, register
from hybrid_rl.algos.policy_losses.ratios import log_ratio_at
from hybrid_rl.options import key


@register
@dataclass(frozen=True)
class CISPO(PolicyObjective):
    """Clipped importance sampling policy optimisation: `-sg(clip(w, 1 - epsilon, 1 + epsilon_high)) A ln p`.

    MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5: the clipped w is detached and weighs the gradient of ln p, which no
    token loses. The paper gives no bounds; those here are of ScaleRL (arXiv:2510.13786): weights of at most 5, no lower
    bound. With `importance_sampling_level=sequence`, as in TRL, a token keeps its own advantage and ln p.
    """

    objective: Literal["cispo"] = key("cispo", "the policy loss")
    epsilon: float | None = key(None, "weights are at least 1 - this; None = no lower bound", above=0, maximum=1)
    epsilon_high: float = key(4.0, "weights are at most 1 + this (TRL gives the bound itself: 5)", above=0)
    importance_sampling_level: Literal["token", "sequence"] = key(
        "token", "sequence = the weight of a completion, the geometric mean over its tokens, stands at each of them"
    )

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """The weighted log-likelihood; the metric is the share of tokens whose weight was clipped."""
        ratio = ratio_of(log_ratio_at(inputs, self.importance_sampling_level))
        detached = ratio.detach()
        weight = detached.clamp(min=0.0 if self.epsilon is None else 1 - self.epsilon, max=1 + self.epsilon_high)
        per_token = -weight * inputs.kept(inputs.advantages.detach()) * inputs.kept(inputs.logprobs)
        return PolicyLoss.unclipped(per_token, ratio, {"cispo_clip_ratio": (weight != detached).float()})
