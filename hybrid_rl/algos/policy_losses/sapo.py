"""SAPO: a smooth gate in place of the clip."""

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
class SAPO(PolicyObjective):
    """Soft adaptive policy optimisation (arXiv:2511.20347), with the paper's temperatures."""

    objective: Literal["sapo"] = key("sapo", "the policy loss")
    sapo_temperature_pos: float = key(1.0, "how fast the gate closes for tokens with a positive advantage", above=0)
    sapo_temperature_neg: float = key(1.05, "how fast it closes for the other tokens", above=0)

    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = key(
        "token",
        "sequence = the gate is that of the completion's ratio, the geometric mean over its tokens; sequence_token = "
        "the same value, each token with its own advantage and gradient",
    )

    @property
    def is_per_completion(self) -> bool:  # type: ignore[override]
        """See PolicyObjective."""
        return self.importance_sampling_level == "sequence"

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        return soft_gated_policy_loss(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            inputs.mask,
            inputs.rows,
            inputs.num_rows,
            temperature_pos=self.sapo_temperature_pos,
            temperature_neg=self.sapo_temperature_neg,
            importance_sampling_level=self.importance_sampling_level,
        )


def soft_gated_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    temperature_pos: float,
    temperature_neg: float,
    importance_sampling_level: str = "token",
) -> PolicyLoss:
    """-(4 / tau) * sigmoid(tau * (ratio - 1)) * A, tau = temperature_pos where A > 0, else temperature_neg.

    SAPO, arXiv:2511.20347: the gradient is ratio * sech^2(tau * (ratio - 1) / 2) * A times that of ln p,
    at the old policy that of the unclipped objective. The value at the old policy is -2 A / tau, not -A.
    importance_sampling_level: whose ratio it is, see `at_level` ("sequence" as in TRL). logprobs, old_logprobs,
    advantages: float [T]; mask: bool [T]; rows: int64 [T], in 0..num_rows-1. Gradients flow through logprobs only.
    `weight` is the plain ratio.
    """
    check_columns(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, rows=rows)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    ratio = ratio_of(at_level(log_ratio, mask, rows, num_rows, importance_sampling_level))
    advantages = masked_advantages(advantages, mask)
    temperature = torch.full_like(ratio, temperature_neg).masked_fill(advantages > 0, temperature_pos)
    gate = torch.sigmoid(temperature * (ratio - 1))
    # What is left of the gradient of the plain ratio, 1 at the old policy.
    share = (4 * gate * (1 - gate)).detach()
    return PolicyLoss.unclipped(-4 / temperature * gate * advantages, ratio, {"sapo/gate": share})
