"""Estimators for the best of several completions: pass@k, and the maximum of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.advantages.group_rewards import GroupEstimator, Groups
from hybrid_rl.algos.interface import register
from hybrid_rl.algos.options import key

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class PassAtK(GroupEstimator):
    """Pass@k training: the mean, over the subsets of k samples that hold a sample, of a subset's GRPO advantage.

    arXiv:2508.10751, eqs. 14 and 15. A subset is worth 1 if one of it succeeds, else 0. With n scored samples, m of
    them failures, and C(a, b) binomial coefficients: `R = 1 - C(m, k) / C(n, k)`, `sigma = sqrt(R (1 - R))`,
    `A(success) = (1 - R) / sigma`, `A(failure) = (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / sigma`.

    Advantages of a group add up to 0. sigma is 0 if every subset succeeds (fewer than k failures) or none does: exactly
    0 there, and in groups of at most k scored samples, for which the paper has none.
    """

    estimator: Literal["pass_at_k"] = key("pass_at_k", "the advantage estimator")
    pass_k: int = key(4, "completions of which one must succeed; fewer than num_generations", minimum=1)
    success_threshold: float = key(1.0, "a reward of at least this is a success")
    takes_kl_rewards = False

    @property
    def min_generations(self) -> int:
        """k + 1: with k = n there is one subset, which has nothing to be compared with."""
        return self.pass_k + 1

    def of_samples(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Compute A(success) or A(failure)."""
        grouping, pass_k = Groups.of(rewards, groups), self.pass_k
        success = grouping.scored & (grouping.rewards >= self.success_threshold)
        count = grouping.counts
        failures = count - grouping.sum(success.double())
        usable = (count > pass_k) & (failures >= pass_k) & (failures < count)
        # Other groups get numbers that divide by nothing; they are left out below.
        count, failures = torch.where(usable, count, pass_k + 1.0), torch.where(usable, failures, float(pass_k))
        all_fail = _binomial_ratio(failures, count, pass_k)
        sigma = (all_fail * (1 - all_fail)).sqrt()
        others_fail = _binomial_ratio(failures - 1, count - 1, pass_k - 1)
        of_success, of_failure = (all_fail / sigma)[grouping.index], ((all_fail - others_fail) / sigma)[grouping.index]
        return torch.where(grouping.scored & usable[grouping.index], torch.where(success, of_success, of_failure), 0.0)


@register
@dataclass(frozen=True)
class MaxOfGroup(GroupEstimator):
    """Max@k: max of the group - max of the group without the sample: best - second best for the best sample, 0 for all
    others.

    arXiv:2503.19595, the leave-one-out baseline for E[max of n]; n is the group. `scale_rewards=group` divides by the
    standard deviation + 1e-4, which others call GRPO pass@k. Two best ones: 0.
    """

    estimator: Literal["max_of_group"] = key("max_of_group", "the advantage estimator")
    scale_rewards: Literal["group", "none"] = key("none", "divide by the standard deviation of the group")
    is_never_negative = True

    def of_samples(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Compute the gain of the best sample."""
        grouping = Groups.of(rewards, groups)
        order, starts = grouping.ranking(grouping.rewards)
        ends = starts + grouping.counts.long()
        several = grouping.counts > 1
        best, second = order[ends[several] - 1], order[ends[several] - 2]
        gain = (grouping.rewards[best] - grouping.rewards[second]) / grouping.scale(self.scale_rewards)[several]
        return torch.zeros_like(grouping.rewards).index_copy(0, best, gain)


def _binomial_ratio(top: Tensor, bottom: Tensor, k: int) -> Tensor:
    """Compute C(top, k) / C(bottom, k) = product over j < k of (top - j) / (bottom - j), for bottom >= top >= k."""
    ratio = torch.ones_like(top)
    for j in range(k):
        ratio = ratio * (top - j) / (bottom - j)
    return ratio
