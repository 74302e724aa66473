"""Decoupled PPO: the clip is around a proximal policy, which need not be the one that made the tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns, masked_log_ratio, ratio_of
from hybrid_rl.algos.inputs import LossInputs, PolicyLoss
from hybrid_rl.algos.policy_losses.clip import clipped_policy_loss
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.options import key


@dataclass(frozen=True)
class _AroundProximal(PolicyObjective):
    """What both objectives have."""

    objective: str = key("", "the policy loss")
    epsilon: float = key(0.2, "ratio clip below 1, around the proximal policy", above=0, maximum=1)
    epsilon_high: float | None = key(None, "ratio clip above 1; None = epsilon", above=0)
    corrects_rollout = True

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        return decoupled_policy_loss(
            inputs.logprobs,
            self.proximal(inputs),
            inputs.rollout_logprobs,
            inputs.advantages,
            inputs.mask,
            inputs.rows,
            inputs.num_rows,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
        )

    def proximal(self, inputs: LossInputs) -> Tensor:
        """Logprobs of the policy that the clip is around, float [T]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Decoupled(_AroundProximal):
    """Decoupled PPO of AReaL (arXiv:2505.24298); the proximal policy is the learner at the start of the training step,
    as `old_logprobs` has it."""

    objective: Literal["decoupled"] = key("decoupled", "the policy loss")
    uses_proximal = True

    def proximal(self, inputs: LossInputs) -> Tensor:
        """The old policy."""
        return inputs.old_logprobs


@dataclass(frozen=True)
class A3PO(_AroundProximal):
    """A-3PO (arXiv:2512.06547): decoupled PPO whose proximal policy is estimated from the ages of the tokens. It reads
    no old logprobs, so none need be computed."""

    objective: Literal["a3po"] = key("a3po", "the policy loss")
    uses_old_logprobs = False

    def proximal(self, inputs: LossInputs) -> Tensor:
        """Between the engine's policy and the learner's."""
        if inputs.token_versions is None:
            raise ValueError("token_versions is None, but a3po needs the policy version behind each token; give them")
        return log_linear_proximal(
            inputs.logprobs,
            inputs.rollout_logprobs,
            inputs.token_versions,
            version=inputs.version,
            newest=inputs.newest_version,
        )


def decoupled_policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    epsilon: float,
    epsilon_high: float,
) -> PolicyLoss:
    """-(p_prox / p_behav) * min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A), r = p / p_prox.

    AReaL, arXiv:2505.24298, section 5.2 (after arXiv:2110.00641). p_behav made the tokens; p_prox is
    recent. p_prox / p_behav is a constant of the update; it is not truncated below e^20 (for a truncated one: objective
    "clip" with a truncating correction). `weight` and `ratio` of the result are p / p_behav.

    logprobs, proximal_logprobs, behavior_logprobs, advantages: float [T]; mask: bool [T]; rows: int64 [T], in
    0..num_rows-1. Gradients flow through logprobs only.
    """
    check_columns(logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    loss = clipped_policy_loss(
        logprobs, proximal_logprobs, advantages, mask, rows, num_rows, epsilon=epsilon, epsilon_high=epsilon_high
    )
    behavior_weight = ratio_of(masked_log_ratio(proximal_logprobs.detach(), behavior_logprobs, mask))
    weight = ratio_of(masked_log_ratio(logprobs, behavior_logprobs, mask))
    return dataclasses.replace(
        loss,
        per_token=behavior_weight * loss.per_token,
        weight=weight,
        ratio=weight.detach(),
        metrics={"behavior_weight": behavior_weight},
    )


def log_linear_proximal(
    logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, *, version: int, newest: int | None = None
) -> Tensor:
    """ln p_behav + a * (ln p - ln p_behav) with a = (v_prox - v_behav) / (v - v_behav) and v_prox = v - 1, detached.

    A-3PO, arXiv:2512.06547: with d = v - v_behav this is (ln p_behav) / d + (1 - 1/d) ln p for d >= 1. A fresh token
    (d = 0) has p_prox = p_behav, as in the paper; so has one of unknown version (-1).

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
            "the learner's publications"
        )
    ages = torch.where(versions < 0, torch.zeros_like(versions), version - versions).to(logprobs.dtype)
    share = (ages - 1).clamp(min=0) / ages.clamp(min=1)
    behavior = behavior_logprobs.detach()
    return behavior + share * (logprobs.detach() - behavior)
