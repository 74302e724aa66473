"""REINFORCE: the policy gradient without a ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, PolicyObjective, register
from hybrid_rl.options import key


@register
@dataclass(frozen=True)
class Reinforce(PolicyObjective):
    """REINFORCE: `-A ln p` (Williams, 1992), the gradient of the expected advantage if the policy itself made the
    tokens.

    With advantage 1 for what is to be imitated it is supervised learning (SFT, rejection sampling). The ratio to the
    old policy is reported and takes no part.
    """

    objective: Literal["reinforce"] = key("reinforce", "the policy loss")

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """The log-likelihood, weighted by the advantage."""
        advantages = inputs.kept(inputs.advantages.detach())
        return PolicyLoss.unclipped(-advantages * inputs.kept(inputs.logprobs), ratio_of(inputs.log_ratio))
