"""Ratios of policy and old policy, of a token or of a whole completion (GSPO, LUSPO), and their bounds: PPO's clip
around 1, and SAPO's smooth gate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, PolicyObjective, own, register
from hybrid_rl.algos.masked import row_mean, take
from hybrid_rl.algos.options import key
from hybrid_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def at_level(log_ratio: Tensor, mask: Tensor, rows: Tensor, num_rows: int, level: str) -> Tensor:
    """Return ln of the ratio that each token is weighted by, [T].

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
        return take(row_mean(log_ratio, mask, rows, num_rows), rows)
    if level == "sequence_token":
        mean = row_mean(log_ratio.detach(), mask, rows, num_rows)[rows]
        return mean + (log_ratio - log_ratio.detach())
    raise ValueError(f"importance_sampling_level={level!r} is unknown; use token, sequence or sequence_token")


def log_ratio_at(inputs: LossInputs, level: str) -> Tensor:
    """Return `at_level` of the inputs' log ratio."""
    return at_level(inputs.log_ratio, inputs.mask, inputs.rows, inputs.num_rows, level)


@dataclass(frozen=True)
class ClipRange(PolicyObjective):
    """Base of the losses whose ratio is clipped to 1 - epsilon .. 1 + epsilon_high."""

    epsilon: float = key(0.2, "ratio clip below 1", above=0, maximum=1)
    epsilon_high: float | None = key(None, "ratio clip above 1; None = epsilon", above=0)

    @property
    def high(self) -> float:
        """epsilon_high; epsilon if it is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def bounds(self) -> tuple[float, float]:
        """1 - epsilon and 1 + epsilon_high."""
        return 1 - self.epsilon, 1 + self.high

    def noted(self, per_token: Tensor, ratio: Tensor, advantages: Tensor) -> PolicyLoss:
        """Return the loss of each token with what the clip did to it. ratio: w, float [T], with gradient; advantages:
        float [T], 0 where masked, without gradient."""
        (low, high), detached = self.bounds, ratio.detach()
        return PolicyLoss(
            per_token,
            weight=ratio,
            ratio=detached,
            clipped_low=(detached < low) & (advantages < 0),
            clipped_high=(detached > high) & (advantages > 0),
        )


@register
@dataclass(frozen=True)
class Clip(ClipRange):
    """The clipped surrogate of PPO, GRPO, DAPO, GSPO and LUSPO: `-min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A)`.

    PPO, arXiv:1707.06347, eq. 7; two bounds: DAPO, arXiv:2503.14476, eq. 10 (epsilon_high = 0.28). Two options bound
    the remaining case, a large ratio with a negative advantage: `delta` bounds the unclipped w from above (two-sided
    clipping, INTELLECT-2, arXiv:2505.07291, eq. 1); `dual_clip` = c bounds the loss of a token with A < 0 at -c A
    (dual-clip PPO, arXiv:1912.09729; verl: 3). There the two are the same if delta > 1 + epsilon_high.

    `importance_sampling_level=sequence` has one w per completion, exp(mean over its tokens of ln p - ln p_old) (GSPO,
    arXiv:2507.18071, eq. 7). Every token has the value of its completion, so that the token mean of a completion is
    that of the paper, and its token sum (`loss_type=sequence_sum`) is LUSPO's, the length times it (arXiv:2602.05261).
    `sequence_token` has the same value and a gradient through the token's own logprob only (GSPO-token, eq. 14), so
    that advantages may differ between tokens.
    """

    objective: Literal["clip"] = key("clip", "the policy loss")
    follows_advantages = True
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
        """Compute the clipped surrogate; the share of tokens beyond `delta` or `dual_clip` is a separate metric."""
        advantages = inputs.kept(inputs.advantages.detach())
        ratio, metrics = ratio_of(log_ratio_at(inputs, self.importance_sampling_level)), {}
        unclipped = ratio if self.delta is None else ratio.clamp(max=self.delta)
        per_token = -torch.minimum(unclipped * advantages, ratio.clamp(*self.bounds) * advantages)
        if self.dual_clip is not None:
            per_token = torch.where(advantages < 0, torch.minimum(per_token, -self.dual_clip * advantages), per_token)
        ceiling = self.delta if self.dual_clip is None else self.dual_clip
        if ceiling is not None:
            metrics = {"clip_ratio/ceiling": ((ratio.detach() > ceiling) & (advantages < 0)).float()}
        per_sample = self.importance_sampling_level != "token"
        loss = self.noted(per_token, ratio, advantages)
        return replace(loss, per_sample=per_sample, metrics=metrics)


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
    follows_advantages = True
    sapo_temperature_pos: float = own(1.0, "how fast the gate closes for tokens with a positive advantage", above=0)
    sapo_temperature_neg: float = own(1.05, "how fast it closes for the other tokens", above=0)
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
        """Compute the gated surrogate; the metric is what is left of the gradient of the plain ratio, 1 at the old
        policy."""
        ratio = ratio_of(log_ratio_at(inputs, self.importance_sampling_level))
        advantages = inputs.kept(inputs.advantages.detach())
        tau = torch.full_like(ratio, self.sapo_temperature_neg).masked_fill(advantages > 0, self.sapo_temperature_pos)
        gate = torch.sigmoid(tau * (ratio - 1))
        share = (4 * gate * (1 - gate)).detach()
        return PolicyLoss.unclipped(-4 / tau * gate * advantages, ratio, {"sapo/gate": share})
