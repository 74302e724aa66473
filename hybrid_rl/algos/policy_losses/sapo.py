"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, PolicyObjective, register
from hybrid_rl.algos.policy_losses.ratios import log_ratio_at
from hybrid_rl.options import key


@register
@dataclass(frozen=True)
class SAPO(PolicyObjective):
    """Soft adaptive policy optimisation: `-(4 / tau) sigmoid(tau (w - 1)) A`, with a tau for A > 0 and one for the
    rest.

    arXiv:2511.20347, with the paper's temperatures. The gradient is `w sech^2(tau (w - 1) / 2) A` times that of ln p,
    at the old policy that of the unclipped objective. The value at the old policy is -2 A / tau, not -A.
    `importance_sampling_level=sequence` takes the w of the completion, as in TRL.
    """

    objective: Literal["sapo"] = key("sapo", "the policy loss")
    sapo_temperature_pos: float = key(1.0, "how fast the gate closes for tokens with a positive advantage", above=0)
    sapo_temperature_neg: float = key(1.05, "how fast it closes for the other tokens", above=0)
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = key(
        "token",
        "sequence = the gate is that of the completion's ratio, the geometric mean over its tokens; sequence_token = "
        "the same value, each token with its own advantage and gradient",
    )

    @property
    def is_per_completion(self) -> bool:
        """True for the ratio of a completion with the gradient of all of its tokens."""
        return self.importance_sampling_level == "sequence"

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """The gated surrogate; the metric is what is left of the gradient of the plain ratio, 1 at the old policy."""
        ratio = ratio_of(log_ratio_at(inputs, self.importance_sampling_level))
        advantages = inputs.kept(inputs.advantages.detach())
        tau = torch.full_like(ratio, self.sapo_temperature_neg).masked_fill(advantages > 0, self.sapo_temperature_pos)
        gate = torch.sigmoid(tau * (ratio - 1))
        share = (4 * gate * (1 - gate)).detach()
        return PolicyLoss.unclipped(-4 / tau * gate * advantages, ratio, {"sapo/gate": share})
