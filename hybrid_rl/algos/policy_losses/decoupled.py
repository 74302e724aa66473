"""Decoupled PPO: losses with the clip around a proximal policy, which need not be the one that made the tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.columns import check_columns, masked_log_ratio, ratio_of
from hybrid_rl.algos.interface import LossInputs, PolicyLoss, register
from hybrid_rl.algos.options import key
from hybrid_rl.algos.policy_losses.clip import ClipRange

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AroundProximal(ClipRange):
    """Base of the losses that are clipped around a proximal policy and weigh what the engine sampled."""

    epsilon: float = key(0.2, "ratio clip below 1, around the proximal policy", above=0, maximum=1)
    corrects_rollout = True

    def around(self, proximal: Tensor, inputs: LossInputs) -> PolicyLoss:
        """Compute -(p_prox / p_roll) * min(u A, clip(u, 1 - epsilon, 1 + epsilon_high) A), u = p / p_prox. `weight` and
        `ratio` are p / p_roll. proximal: ln p_prox, float [T]."""
        engine, advantages = inputs.needed("rollout_logprobs"), inputs.kept(inputs.advantages.detach())
        ratio = ratio_of(masked_log_ratio(inputs.logprobs, proximal, inputs.mask))
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(*self.bounds) * advantages)
        behavior_weight = ratio_of(masked_log_ratio(proximal.detach(), engine, inputs.mask))
        weight = ratio_of(masked_log_ratio(inputs.logprobs, engine, inputs.mask))
        return dataclasses.replace(
            self.noted(behavior_weight * -surrogate, ratio, advantages),
            weight=weight,
            ratio=weight.detach(),
            metrics={"behavior_weight": behavior_weight},
        )


@register
@dataclass(frozen=True)
class Decoupled(AroundProximal):
    """Decoupled PPO of AReaL: `-(p_old / p_roll) min(u A, clip(u, 1 - epsilon, 1 + epsilon_high) A)`, u = p / p_old.

    arXiv:2505.24298, section 5.2 (after arXiv:2110.00641). The proximal policy is the learner at the start of the
    training step, p_old. The factor in front is a constant of the update and not truncated below e^20 (for a truncated
    one: `policy_loss=clip` with a truncating correction).
    """

    objective: Literal["decoupled"] = key("decoupled", "the policy loss")
    follows_advantages = True
    uses_proximal = True

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the loss with the clip around the old policy."""
        return self.around(inputs.old_logprobs, inputs)


@register
@dataclass(frozen=True)
class A3PO(AroundProximal):
    """A-3PO: decoupled PPO with `ln p_prox = ln p_roll + a sg(ln p - ln p_roll)`, a = 1 - 1/d for tokens d versions
    old.

    arXiv:2512.06547. No old logprobs are read, so none need be computed. A fresh token (d = 0) has p_prox = p_roll, as
    in the paper; so has one of unknown age.
    """

    objective: Literal["a3po"] = key("a3po", "the policy loss")
    follows_advantages = True
    uses_old_logprobs = False

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the loss with the clip around a policy between the engine's and the learner's."""
        proximal = log_linear_proximal(
            inputs.logprobs,
            inputs.needed("rollout_logprobs"),
            inputs.needed("token_versions"),
            version=inputs.version,
            newest=inputs.newest_version,
        )
        return self.around(proximal, inputs)


def log_linear_proximal(
    logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, *, version: int, newest: int | None = None
) -> Tensor:
    """Compute ln p_behav + a * (ln p - ln p_behav) with a = (v_prox - v_behav) / (v - v_behav) and v_prox = v - 1,
    detached.

    A-3PO, arXiv:2512.06547: with d = v - v_behav this is (ln p_behav) / d + (1 - 1/d) ln p for d >= 1.

    logprobs, behavior_logprobs: float [T]; versions: int64 [T]; version: of the learner; newest: the largest of
    `versions`, None if the caller does not know it: then it is looked up. Raises ValueError for a token that is newer
    than the learner.
    """
    check_columns(logprobs=logprobs, behavior_logprobs=behavior_logprobs, versions=versions)
    if newest is None and len(versions):
        newest = int(versions.max())
    if newest is not None and newest > version:
        raise ValueError(
            f"a token has version {newest}, but the learner is at version={version}; versions must count "
            "the learner's weight updates"
        )
    ages = torch.where(versions < 0, torch.zeros_like(versions), version - versions).to(logprobs.dtype)
    share = (ages - 1).clamp(min=0) / ages.clamp(min=1)
    behavior = behavior_logprobs.detach()
    return behavior + share * (logprobs.detach() - behavior)
