"""Estimators for the best of several completions: pass@k, and the maximum of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.groups import Groups
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.options import key


@dataclass(frozen=True)
class PassAtK(AdvantageEstimator):
    """GRPO's advantage of all subsets of k completions, in closed form (arXiv:2508.10751)."""

    estimator: Literal["pass_at_k"] = key("pass_at_k", "the advantage estimator")
    pass_k: int = key(4, "completions of which one must succeed; fewer than num_generations", minimum=1)
    success_threshold: float = key(1.0, "a reward of at least this is a success")
    min_generations = 2
    takes_kl_rewards = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # With k = n there is one subset, which has nothing to be compared with.
        object.__setattr__(self, "min_generations", self.pass_k + 1)

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        advantages = pass_at_k_advantages(
            inputs.rewards, inputs.groups, pass_k=self.pass_k, success_threshold=self.success_threshold
        )
        return Advantages(inputs.per_token(advantages))


@dataclass(frozen=True)
class MaxOfGroup(AdvantageEstimator):
    """What the best completion adds to the maximum of its group (arXiv:2503.19595)."""

    estimator: Literal["max_of_group"] = key("max_of_group", "the advantage estimator")
    scale_rewards: Literal["group", "none"] = key("none", "divide by the standard deviation of the group")
    min_generations = 2
    is_never_negative = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        advantages = max_of_group_advantages(inputs.rewards, inputs.groups, scale_rewards=self.scale_rewards)
        return Advantages(inputs.per_token(advantages))


def pass_at_k_advantages(rewards: Tensor, groups: Tensor, *, pass_k: int, success_threshold: float = 1.0) -> Tensor:
    """Pass@k training: A of a sample = mean, over the subsets of k samples that hold it, of a subset's GRPO advantage.

    arXiv:2508.10751, eqs. 14 and 15. A subset is worth 1 where one of it succeeds, else 0. With n scored samples, m of
    them failures, and C(a, b) binomial coefficients:

        R = 1 - C(m, k) / C(n, k),    sigma = sqrt(R (1 - R)),
        A(success) = (1 - R) / sigma,    A(failure) = (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / sigma.

    Advantages of a group add up to 0. sigma is 0 where every subset succeeds (fewer than k failures) or none does:
    exactly 0 there, and in groups of at most k scored samples, where the paper has none.

    rewards: float [N], NaN where a sample could not be scored; groups: int64 [N]. Returns float64 [N].
    """
    if pass_k < 1:
        raise ValueError(f"pass_k={pass_k} must be at least 1")
    found = Groups.of(rewards, groups)
    success = found.scored & (found.rewards >= success_threshold)
    count = found.counts
    failures = count - found.sum(success.double())
    usable = (count > pass_k) & (failures >= pass_k) & (failures < count)
    # Other groups get numbers that divide by nothing; they are left out below.
    count, failures = torch.where(usable, count, pass_k + 1.0), torch.where(usable, failures, float(pass_k))
    all_fail = _binomial_ratio(failures, count, pass_k)
    sigma = (all_fail * (1 - all_fail)).sqrt()
    others_fail = _binomial_ratio(failures - 1, count - 1, pass_k - 1)
    advantage = torch.where(success, (all_fail / sigma)[found.index], ((all_fail - others_fail) / sigma)[found.index])
    return torch.where(found.scored & usable[found.index], advantage, 0.0)


def max_of_group_advantages(rewards: Tensor, groups: Tensor, *, scale_rewards: str = "none") -> Tensor:
    """A_i = max of the group - max of the group without i: best - second best for the best sample, 0 for all others.

    arXiv:2503.19595, the leave-one-out baseline for E[max of n]; n is the group. scale_rewards="group" divides by the
    standard deviation + 1e-4, which others call GRPO pass@k. Two best ones: 0.

    rewards: float [N], NaN where a sample could not be scored; groups: int64 [N]. Returns float64 [N]: 0 for unscored
    samples and for one scored sample alone.
    """
    found = Groups.of(rewards, groups)
    order, starts = found.ranking(found.rewards)
    ends = starts + found.counts.long()
    several = found.counts > 1
    best, second = order[ends[several] - 1], order[ends[several] - 2]
    gain = (found.rewards[best] - found.rewards[second]) / found.scale(scale_rewards)[several]
    return torch.zeros_like(found.rewards).index_copy(0, best, gain)


def _binomial_ratio(top: Tensor, bottom: Tensor, k: int) -> Tensor:
    """C(top, k) / C(bottom, k) = product over j < k of (top - j) / (bottom - j), for bottom >= top >= k."""
    ratio = torch.ones_like(top)
    for j in range(k):
        ratio = ratio * (top - j) / (bottom - j)
    return ratio
