"""PPO's clipped surrogate, with the ratio of a token or of a whole completion (GSPO, LUSPO)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from hybrid_rl.algos.interface import LossInputs, PolicyLoss, register
from hybrid_rl.algos.policy_losses.ratios import ClipRange, log_ratio_at
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import key


@register
@dataclass(frozen=True)
class Clip(ClipRange):
    """The clipped surrogate of PPO, GRPO, DAPO, GSPO and LUSPO: `-min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A)`.

    PPO, arXiv:1707.06347, eq. 7; two bounds: DAPO, arXiv:2503.14476, eq. 10 (epsilon_high = 0.28). Two options bound
    what is left open, a large ratio with a negative advantage: `delta` bounds the unclipped w from above (two-sided
    clipping, INTELLECT-2, arXiv:2505.07291, eq. 1); `dual_clip` = c bounds the loss of a token with A < 0 at -c A
    (dual-clip PPO, arXiv:1912.09729; verl: 3). There the two are the same if delta > 1 + epsilon_high.

    `importance_sampling_level=sequence` has one w per completion, exp(mean over its tokens of ln p - ln p_old) (GSPO,
    arXiv:2507.18071, eq. 7). Every token has the value of its completion, so that the token mean of a completion is
    that of the paper, and its token sum (`loss_type=sequence_sum`) is LUSPO's, the length times it (arXiv:2602.05261).
    `sequence_token` has the same value and a gradient through the token's own logprob only (GSPO-token, eq. 14), so
    that advantages may differ between tokens.
    """

    objective: Literal["clip"] = key("clip", "the policy loss")
    epsilon_high: float | None = key(None, "ratio clip above 1; None = epsilon (DAPO: 0.28)", above=0)
    delta: float | None = key(None, "upper bound of the unclipped ratio as well (two-sided clip); None = off", above=1)
    dual_clip: float | None = key(
        None, "if the advantage is negative, the loss stops at this times its size; None = off (verl: 3)", above=1
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
    def is_per_completion(self) -> bool:
        """True for the ratio of a completion with the gradient of all of its tokens."""
        return self.importance_sampling_level == "sequence"

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """The clipped surrogate; the share of tokens beyond `delta` or `dual_clip` is a metric of its own."""
        advantages = inputs.kept(inputs.advantages.detach())
        loss = self.clipped(log_ratio_at(inputs, self.importance_sampling_level), advantages, delta=self.delta)
        per_token, metrics = loss.per_token, {}
        if self.dual_clip is not None:
            per_token = torch.where(advantages < 0, torch.minimum(per_token, -self.dual_clip * advantages), per_token)
        ceiling = self.delta if self.dual_clip is None else self.dual_clip
        if ceiling is not None:
            metrics = {"clip_ratio/ceiling": ((loss.ratio > ceiling) & (advantages < 0)).float()}
        per_sample = self.importance_sampling_level != "token"
        return replace(loss, per_token=per_token, per_sample=per_sample, metrics=metrics)
