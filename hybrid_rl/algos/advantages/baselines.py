"""Estimators that differ from GRPO in what a reward is compared with, or in what it is divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.advantages.group_rewards import GroupEstimator, Groups, whitened
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages, Needs, register
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.options import key

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class RLOO(GroupEstimator):
    """REINFORCE leave-one-out: `n / (n - 1) (r - mean)` = r less the mean of the other scored rewards of the group.

    arXiv:2402.14740. The baseline does not depend on the sample itself, so that the gradient is unbiased; a group mean
    scales it by 1 - 1/n.
    """

    estimator: Literal["rloo"] = key("rloo", "the advantage estimator")

    def of_samples(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Compute the difference, exactly 0 in a group whose rewards are all equal."""
        grouping = Groups.of(rewards, groups)
        factor = grouping.counts / (grouping.counts - 1).clamp(min=1)
        return torch.where(grouping.compared, factor[grouping.index] * grouping.centred, 0.0)


@register
@dataclass(frozen=True)
class GPG(GroupEstimator):
    """Group policy gradient: `B / (B - M) (r - mean) / F`, with B scored samples, of which M are in groups without
    signal.

    arXiv:2504.02546 (accurate gradient estimation): samples of groups whose rewards are all equal have no gradient, yet
    count in the mean over the batch; the factor makes up for them. F = 1 is the paper's choice
    (`scale_rewards=none`); `group` is F = standard deviation of the group + 1e-4. M counts samples whose advantage is 0
    because the group says nothing, not rewards that are 0; it is counted over the batch of all ranks. If no group has
    signal, all is 0.
    """

    estimator: Literal["gpg"] = key("gpg", "the advantage estimator")
    scale_rewards: Literal["group", "none"] = key(
        "none", "divide centred rewards by the standard deviation of the group (the paper's F_norm)"
    )
    sees_all_ranks = True

    def of_samples(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Compute the scaled difference, exactly 0 in a group whose rewards are all equal."""
        grouping = Groups.of(rewards, groups)
        factor = grouping.scored.sum().double() / grouping.compared.sum().clamp(min=1)
        scaled = factor * grouping.centred / grouping.scale(self.scale_rewards)[grouping.index]
        return torch.where(grouping.compared, scaled, 0.0)


@register
@dataclass(frozen=True)
class MaxRL(GroupEstimator):
    """Maximum-likelihood RL: `(r - mean) / mean`, the gradient of ln(success rate); 0 if the mean of the group is 0.

    arXiv:2602.02710, for rewards 0 and 1: with K successes of n samples, the sum of A grad ln p over the group is n
    times the mean of grad ln p over the successes, less a control variate. The paper leaves other rewards undefined;
    here any that are not negative are taken. Negative ones raise ValueError: divided by their mean, signs would turn
    over.
    """

    estimator: Literal["maxrl"] = key("maxrl", "the advantage estimator")
    takes_kl_rewards = False

    def of_samples(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Compute the relative difference, exactly 0 in a group whose rewards are all equal."""
        grouping = Groups.of(rewards, groups)
        least = float(grouping.rewards.min()) if len(rewards) else 0.0
        if least < 0:
            raise ValueError(
                f"MaxRL divides by the mean reward of a group, but a reward is {least}; use rewards of at least 0 "
                "(1 = success), without penalties in them"
            )
        mean = grouping.mean(grouping.rewards)[grouping.index]
        # If rewards are not all equal and none is negative, the mean is above 0.
        return torch.where(grouping.compared, grouping.centred / torch.where(mean > 0, mean, 1.0), 0.0)


@register
@dataclass(frozen=True)
class OPO(AdvantageEstimator):
    """On-policy RL with optimal reward baseline: `r - sum(T r) / sum(T)` over the group, T the number of tokens that
    the policy made.

    arXiv:2505.23585: the baseline of least variance weighs rewards by the squared norm of the gradient of ln p, taken
    as proportional to the length. 0 in groups without any such token.
    """

    estimator: Literal["opo"] = key("opo", "the advantage estimator")
    min_generations = 2

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute differences to the weighted mean."""
        grouping = Groups.of(inputs.rewards, inputs.groups)
        lengths = row_sum(inputs.mask.double(), inputs.rows, len(inputs.rewards))
        total = grouping.sum(lengths)
        baseline = grouping.sum(lengths / total.clamp(min=1)[grouping.index] * grouping.rewards)
        keep = grouping.compared & (total > 0)[grouping.index]
        return Advantages(inputs.per_token(torch.where(keep, grouping.rewards - baseline[grouping.index], 0.0)))


@register
@dataclass(frozen=True)
class ReMax(AdvantageEstimator):
    """ReMax: the sum of the rewards from token t on, less the reward of the greedy completion of the prompt.

    arXiv:2310.10505. With rewards for whole completions only, as in the paper, that is r - b at every token; with
    rewards of tokens no token answers for those before it. One greedy completion per prompt is also made and
    scored; a sample without one of the two rewards has advantage 0.
    """

    estimator: Literal["remax"] = key("remax", "the advantage estimator")
    needs = frozenset({Needs.BASELINE_REWARDS})
    uses_step_rewards = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute rewards to come, less the baseline."""
        baseline = inputs.needed("baseline_rewards")
        steps = Steps.of(inputs.mask, inputs.rows, len(inputs.rewards))
        earned = step_rewards(inputs.rewards, inputs.token_rewards, inputs.mask, inputs.rows)
        ahead = steps.discounted(steps.take(earned), 1.0)
        known = ~(inputs.rewards.isnan() | baseline.isnan())[steps.rows]
        return Advantages(steps.spread(torch.where(known, ahead - baseline.double()[steps.rows], 0.0)))


ENERGY_FLOOR = 1e-8  # if no path has any energy yet, the baseline is the plain mean


@register
@dataclass(frozen=True)
class OptimalTokenBaseline(AdvantageEstimator):
    """Optimal token baseline: `G_t - sum(G_t W_t) / sum(W_t)` over the samples of the group that reach step t; G_t the
    sum of the rewards from t on, `W_t` = sum up to t of `1 - 2 p + sum_V p^2`.

    arXiv:2602.07078. The terms of W are squared norms of the gradient of ln p with respect to the logits: the energy of
    the path so far. Only tokens that the policy made are steps, so that position t is its t-th own token. A sample that
    is the only one to reach t is its own baseline, and if all that reach t earn the same there is no difference:
    exactly 0 in both cases.
    """

    estimator: Literal["optimal_token_baseline"] = key("optimal_token_baseline", "the advantage estimator")
    needs = frozenset({Needs.LOGPROBS, Needs.SUM_PI_SQUARED})
    min_generations = 2
    tells_tokens_apart = uses_step_rewards = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute rewards to come against the weighted baseline of their position."""
        steps = Steps.of(inputs.mask, inputs.rows, len(inputs.rewards))
        earned = step_rewards(inputs.rewards, inputs.token_rewards, inputs.mask, inputs.rows)
        ahead = steps.discounted(steps.take(earned), 1.0)
        probabilities = steps.take(inputs.needed("logprobs")).exp()
        squares = steps.take(inputs.needed("sum_pi_squared"))
        # (1 - p)^2 + the p^2 of other tokens: below 0 by rounding only.
        energy = (1 - 2 * probabilities + squares).clamp(min=0)
        weight = steps.accumulated(energy) + ENERGY_FLOOR

        scored = inputs.scored[steps.rows]
        _, group = inputs.groups.unique(return_inverse=True)
        width = int(steps.lengths.max()) if len(steps.lengths) else 0
        # The samples of a group that reach the same step are compared.
        grouping = Groups.of(ahead[scored], (group[steps.rows] * width + steps.position)[scored])
        baseline = grouping.sum(grouping.rewards * weight[scored]) / grouping.sum(weight[scored])
        advantages = torch.zeros_like(ahead)
        advantages[scored] = torch.where(grouping.compared, grouping.rewards - baseline[grouping.index], 0.0)
        return Advantages(steps.spread(advantages))


@register
@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++: `whiten(sum over s >= t of gamma^(s-t) r_s)` over all tokens of the batch.

    arXiv:2501.03262, with gamma = 1: r(completion) - beta * sum of the KL from t on; the paper's KL is `kl=reward`.
    Steps are the tokens that the policy made; what is between them does not discount.
    """

    estimator: Literal["reinforce_plus_plus"] = key("reinforce_plus_plus", "the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    uses_step_rewards = True

    @property
    def tells_tokens_apart(self) -> bool:
        """True with a discount."""
        return self.gamma < 1

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute normalised returns."""
        steps = Steps.of(inputs.mask, inputs.rows, len(inputs.rewards))
        earned = steps.take(step_rewards(inputs.rewards, inputs.token_rewards, inputs.mask, inputs.rows))
        returns = steps.spread(steps.discounted(earned, self.gamma))
        return Advantages(whitened(returns, inputs.learned, inputs.gather))


@register
@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """REINFORCE++-baseline: `whiten(r - mean)`.

    arXiv:2501.03262. The paper leaves open what it is normalised over: here over tokens, as without the baseline, so
    that it is the mean of the loss's own terms that is 0. A group whose rewards are all equal gives exactly 0 before
    normalisation, and so does the only scored sample of a group.
    """

    estimator: Literal["reinforce_plus_plus_baseline"] = key("reinforce_plus_plus_baseline", "the advantage estimator")
    min_generations = 2

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute normalised differences."""
        grouping = Groups.of(inputs.rewards, inputs.groups)
        centred = inputs.per_token(torch.where(grouping.compared, grouping.centred, 0.0))
        return Advantages(whitened(centred, inputs.learned, inputs.gather))
