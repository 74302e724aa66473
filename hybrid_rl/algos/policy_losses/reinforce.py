"""REINFORCE: the policy gradient without a ratio."""

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
class Reinforce(PolicyObjective):
    """REINFORCE. With advantage 1 for what is to be imitated it is supervised learning (SFT, rejection sampling)."""

    objective: Literal["reinforce"] = key("reinforce", "the policy loss")

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        return reinforce_policy_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask)


def reinforce_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """-A * ln p (Williams, 1992): the gradient of the expected advantage where the policy itself made the tokens.

    logprobs, old_logprobs, advantages: float [T]; mask: bool [T]. Gradients flow through logprobs only. The ratio to
    the old policy is reported and takes no part.
    """
    check_columns(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    weight = ratio_of(masked_log_ratio(logprobs, old_logprobs, mask))
    logprobs = torch.where(mask, logprobs, torch.zeros_like(logprobs))
    return PolicyLoss.unclipped(-masked_advantages(advantages, mask) * logprobs, weight)
