"""Estimators that differ from GRPO in what a reward is compared with, or in the scale of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.groups import Groups, whole_batch
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.columns import check_rewards
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.options import key


@dataclass(frozen=True)
class RLOO(AdvantageEstimator):
    """Each reward against the mean of the others of its group (arXiv:2402.14740)."""

    estimator: Literal["rloo"] = key("rloo", "the advantage estimator")
    min_generations = 2

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        return Advantages(inputs.per_token(leave_one_out_advantages(inputs.rewards, inputs.groups)))


@dataclass(frozen=True)
class GPG(AdvantageEstimator):
    """Centred rewards, scaled up by the share of samples in groups without signal (arXiv:2504.02546)."""

    estimator: Literal["gpg"] = key("gpg", "the advantage estimator")
    scale_rewards: Literal["group", "none"] = key(
        "none", "divide centred rewards by the standard deviation of the group (the paper's F_norm)"
    )
    min_generations = 2

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator. The share is that of all ranks."""
        return whole_batch(inputs, lambda r, g: gpg_advantages(r, g, scale_rewards=self.scale_rewards))


@dataclass(frozen=True)
class MaxRL(AdvantageEstimator):
    """Centred rewards divided by the mean of the group: the gradient of ln(success rate) (arXiv:2602.02710)."""

    estimator: Literal["maxrl"] = key("maxrl", "the advantage estimator")
    min_generations = 2
    takes_kl_rewards = False

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        return Advantages(inputs.per_token(maxrl_advantages(inputs.rewards, inputs.groups)))


@dataclass(frozen=True)
class OPO(AdvantageEstimator):
    """Each reward against the length-weighted mean of its group (arXiv:2505.23585)."""

    estimator: Literal["opo"] = key("opo", "the advantage estimator")
    min_generations = 2

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        lengths = row_sum(inputs.mask.double(), inputs.rows, len(inputs.rewards))
        return Advantages(inputs.per_token(length_weighted_advantages(inputs.rewards, inputs.groups, lengths)))


@dataclass(frozen=True)
class ReMax(AdvantageEstimator):
    """Each reward against that of the greedy completion of its prompt (arXiv:2310.10505)."""

    estimator: Literal["remax"] = key("remax", "the advantage estimator")
    needs = frozenset({"baseline_rewards"})
    uses_step_rewards = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        baseline = inputs.needed("baseline_rewards")
        advantages = greedy_baseline_advantages(
            inputs.rewards, baseline, inputs.token_rewards, inputs.mask, inputs.rows
        )
        return Advantages(advantages)


def leave_one_out_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO: A_i = r_i - mean of the other scored rewards of the group = n / (n - 1) * (r_i - mean).

    arXiv:2402.14740. The baseline does not depend on the sample itself, so that the gradient is unbiased,
    where a group mean scales it by 1 - 1/n.

    rewards: float [N], NaN where a sample could not be scored; groups: int64 [N]. Returns float64 [N]: 0 for unscored
    samples, where all rewards of a group are equal (exactly), and for one scored sample alone.
    """
    found = Groups.of(rewards, groups)
    factor = found.counts / (found.counts - 1).clamp(min=1)
    centred = found.rewards - found.mean(found.rewards)[found.index]
    return torch.where(found.compared, factor[found.index] * centred, torch.zeros_like(centred))


def gpg_advantages(rewards: Tensor, groups: Tensor, *, scale_rewards: str = "none") -> Tensor:
    """GPG: A = B / (B - M) * (r - mean) / F, with B scored samples, of which M are in groups without signal.

    arXiv:2504.02546 (accurate gradient estimation): samples of groups whose rewards are all equal have no
    gradient, yet count in the mean over the batch; the factor makes up for them. F = 1 is the paper's choice
    (scale_rewards="none"); "group" is F = standard deviation of the group + 1e-4. M counts samples whose advantage is 0
    because the group says nothing, not rewards that are 0. Where no group has signal, all is 0.

    rewards: float [N], NaN where a sample could not be scored; groups: int64 [N]. Returns float64 [N]: 0 as in
    `leave_one_out_advantages`.
    """
    found = Groups.of(rewards, groups)
    factor = found.scored.sum().double() / found.compared.sum().clamp(min=1)
    centred = found.rewards - found.mean(found.rewards)[found.index]
    scaled = factor * centred / found.scale(scale_rewards)[found.index]
    return torch.where(found.compared, scaled, torch.zeros_like(centred))


def maxrl_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """MaxRL: A = (r - mean) / mean, 0 where the mean of the group is 0.

    arXiv:2602.02710, for rewards 0 and 1: with K successes of n samples, the sum of A grad ln p over the
    group is n times the mean of grad ln p over the successes, less a control variate. The paper leaves other rewards
    undefined; here any that are not negative are taken. Negative ones raise ValueError: divided by their mean, signs
    would turn over.

    rewards: float [N], NaN where a sample could not be scored; groups: int64 [N]. Returns float64 [N]: 0 as in
    `leave_one_out_advantages`.
    """
    found = Groups.of(rewards, groups)
    least = float(found.rewards.min()) if len(rewards) else 0.0
    if least < 0:
        raise ValueError(
            f"MaxRL divides by the mean reward of a group, but a reward is {least}; use rewards of at least 0 "
            "(1 = success), without penalties in them"
        )
    mean = found.mean(found.rewards)[found.index]
    # Where rewards are not all equal and none is negative, the mean is above 0.
    return torch.where(found.compared, (found.rewards - mean) / torch.where(mean > 0, mean, 1.0), 0.0)


def length_weighted_advantages(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """OPO: A = r - b, with b = sum(l * r) / sum(l) over the group.

    arXiv:2505.23585: the baseline of least variance weighs rewards by the squared norm of the gradient of
    ln p, taken as proportional to the length l.

    rewards: float [N], NaN where a sample could not be scored; groups: int64 [N]; lengths: [N], tokens that the policy
    made. Returns float64 [N]: 0 as in `leave_one_out_advantages`, and in groups without any such token.
    """
    found = Groups.of(rewards, groups)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths must be [N] as rewards, not {tuple(lengths.shape)} and {tuple(rewards.shape)}")
    lengths = lengths.to(torch.float64)
    total = found.sum(lengths)
    baseline = found.sum(lengths / total.clamp(min=1)[found.index] * found.rewards)
    keep = found.compared & (total > 0)[found.index]
    return torch.where(keep, found.rewards - baseline[found.index], 0.0)


def greedy_baseline_advantages(
    rewards: Tensor, baseline_rewards: Tensor, token_rewards: Tensor, mask: Tensor, rows: Tensor
) -> Tensor:
    """ReMax: A_t = sum of the rewards from t on - reward of the greedy completion.

    arXiv:2310.10505. With rewards for whole completions only, as in the paper, that is r - b at every
    token; with rewards of tokens no token answers for those before it.

    rewards, baseline_rewards: float [N], NaN where the sample, or the greedy completion, could not be scored;
    token_rewards: float [T]; mask: bool [T]; rows: int64 [T], ascending. Returns float64 [T]: 0 where masked, and for
    samples without one of the two rewards.
    """
    check_rewards(rewards=rewards, baseline_rewards=baseline_rewards)
    steps = Steps.of(mask, rows, len(rewards))
    ahead = steps.discounted(steps.take(step_rewards(rewards, token_rewards, mask, rows)), 1.0)
    known = ~(rewards.isnan() | baseline_rewards.isnan())[steps.rows]
    return steps.spread(torch.where(known, ahead - baseline_rewards.double()[steps.rows], 0.0))
