"""PPO's clipped surrogate, with the ratio of a token or of a whole completion (GSPO, LUSPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns, masked_advantages, masked_log_ratio, ratio_of
from hybrid_rl.algos.inputs import LossInputs, PolicyLoss
from hybrid_rl.algos.policy_losses.levels import at_level
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import key


@dataclass(frozen=True)
class Clip(PolicyObjective):
    """The clipped surrogate of PPO, GRPO, DAPO and GSPO."""

    objective: Literal["clip"] = key("clip", "the policy loss")
    epsilon: float = key(0.2, "ratio clip below 1", above=0, maximum=1)
    epsilon_high: float | None = key(None, "ratio clip above 1; None = epsilon (DAPO: 0.28)", above=0)
    delta: float | None = key(None, "upper bound of the unclipped ratio as well (two-sided clip); None = off", above=1)
    dual_clip: float | None = key(
        None, "where the advantage is negative, the loss stops at this times its size; None = off (verl: 3)", above=1
    )
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = key(
        "token",
        "sequence = GSPO's ratio, one per completion; sequence_token = GSPO-token: the same ratio, each token with its "
        "own advantage and gradient",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta is not None and self.dual_clip is not None:
            raise ConfigError(
                f"delta={self.delta} and dual_clip={self.dual_clip} both bound the loss of tokens with a negative "
                "advantage; leave one of them out"
            )

    @property
    def is_per_completion(self) -> bool:  # type: ignore[override]
        """See PolicyObjective."""
        return self.importance_sampling_level == "sequence"

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        return clipped_policy_loss(
            inputs.logprobs,
            inputs.old_logprobs,
            inputs.advantages,
            inputs.mask,
            inputs.rows,
            inputs.num_rows,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            delta=self.delta,
            dual_clip=self.dual_clip,
            importance_sampling_level=self.importance_sampling_level,
        )


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
    importance_sampling_level: str = "token",
) -> PolicyLoss:
    """PPO's clipped surrogate: -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A).

    PPO, arXiv:1707.06347, eq. 7; asymmetric bounds from DAPO, arXiv:2503.14476, eq. 10. Two ways to bound what is left
    open, a large ratio with a negative advantage: `delta` bounds the unclipped ratio from above (two-sided clipping,
    INTELLECT-2, arXiv:2505.07291, eq. 1), `dual_clip` = c bounds the objective from below, max(min(...), c * A) where
    A < 0 (dual-clip PPO, arXiv:1912.09729). There the two are the same where delta > 1 + epsilon_high.

    importance_sampling_level:
    - "token": the ratio of each token.
    - "sequence": one ratio per completion, s = exp(mean over its tokens of ln p - ln p_old) (GSPO, arXiv:2507.18071,
      eq. 7). Every token has the value of its completion, so the token mean of a completion is that of the paper, and
      the token sum (loss_type "sequence_sum") is LUSPO's |y| times it (arXiv:2602.05261).
    - "sequence_token": the same value, and a token's gradient through its own logprob alone, sg[s] * p / sg[p]
      (GSPO-token, eq. 14), so that advantages may differ between tokens.

    logprobs, old_logprobs, advantages: float [T]; mask: bool [T]; rows: int64 [T], the sample of each token in
    0..num_rows-1, every sample whole. Gradients flow through logprobs only; ratios above e^20 count as e^20, in value
    and slope (`ratio_of`). clipped_low and clipped_high are the two sides of the clip; the share of tokens beyond
    `delta` or `dual_clip` is a metric of its own.
    """
    check_columns(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, rows=rows)
    log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
    log_ratio = at_level(log_ratio, mask, rows, num_rows, importance_sampling_level)
    ratio = ratio_of(log_ratio)
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    advantages = masked_advantages(advantages, mask)
    per_token = -torch.minimum(unclipped * advantages, bounded * advantages)
    if dual_clip is not None:
        per_token = torch.where(advantages < 0, torch.minimum(per_token, -dual_clip * advantages), per_token)
    detached = ratio.detach()
    ceiling = delta if dual_clip is None else dual_clip
    beyond = {} if ceiling is None else {"clip_ratio/ceiling": ((detached > ceiling) & (advantages < 0)).float()}
    return PolicyLoss(
        per_token=per_token,
        weight=ratio,
        ratio=detached,
        clipped_low=(detached < 1 - epsilon) & (advantages < 0),
        clipped_high=(detached > 1 + epsilon_high) & (advantages > 0),
        per_sample=importance_sampling_level != "token",
        metrics=beyond,
    )
