"""Ratios of policy and old policy: of a token or of a whole completion, and PPO's clip around 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, PolicyObjective
from hybrid_rl.algos.masked import row_mean
from hybrid_rl.options import key


def at_level(log_ratio: Tensor, mask: Tensor, rows: Tensor, num_rows: int, level: str) -> Tensor:
    """ln of the ratio that each token is weighed by, [T].

    - "token": its own
    - "sequence": the mean over its completion, with the gradient of all of its tokens: that of the geometric mean of
      the ratios (GSPO, arXiv:2507.18071, eq. 7)
    - "sequence_token": the same value with a gradient through the token's own logprob only, sg[s] * p / sg[p]
      (GSPO-token, eq. 14)

    log_ratio: float [T], 0 where masked; mask: bool [T]; rows: int64 [T], in 0..num_rows-1, every sample whole.
    """
    if level == "token":
        return log_ratio
    if level == "sequence":
        return row_mean(log_ratio, mask, rows, num_rows)[rows]
    if level == "sequence_token":
        mean = row_mean(log_ratio.detach(), mask, rows, num_rows)[rows]
        return mean + (log_ratio - log_ratio.detach())
    raise ValueError(f"importance_sampling_level={level!r} is unknown; use token, sequence or sequence_token")


def log_ratio_at(inputs: LossInputs, level: str) -> Tensor:
    """`at_level` of the inputs' own log ratio."""
    return at_level(inputs.log_ratio, inputs.mask, inputs.rows, inputs.num_rows, level)


@dataclass(frozen=True)
class ClipRange(PolicyObjective):
    """Base of the losses whose ratio is clipped to 1 - epsilon .. 1 + epsilon_high."""

    epsilon: float = key(0.2, "ratio clip below 1", above=0, maximum=1)
    epsilon_high: float | None = key(None, "ratio clip above 1; None = epsilon", above=0)

    @property
    def high(self) -> float:
        """epsilon_high, or what stands for it."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def clipped(self, log_ratio: Tensor, advantages: Tensor, *, delta: float | None = None) -> PolicyLoss:
        """PPO's surrogate, -min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A), of each token.

        PPO, arXiv:1707.06347, eq. 7; two bounds: DAPO, arXiv:2503.14476, eq. 10. delta: None = no bound of its own.
        log_ratio: ln w, float [T], with gradient, 0 where masked; w above e^20 counts as e^20, in value and slope.
        advantages: float [T], 0 where masked, without gradient.
        """
        low, high = 1 - self.epsilon, 1 + self.high
        ratio = ratio_of(log_ratio)
        unclipped = ratio if delta is None else ratio.clamp(max=delta)
        detached = ratio.detach()
        return PolicyLoss(
            per_token=-torch.minimum(unclipped * advantages, ratio.clamp(low, high) * advantages),
            weight=ratio,
            ratio=detached,
            clipped_low=(detached < low) & (advantages < 0),
            clipped_high=(detached > high) & (advantages > 0),
        )
