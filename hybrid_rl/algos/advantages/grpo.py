"""GRPO: each reward against its group, for whole completions or step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.advantages.group_rewards import GroupEstimator, Groups
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.interface import AdvantageInputs, Advantages, Needs, register
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.options import key
from hybrid_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# Relative to the dense rewards of a sample, which are float32: a smaller rest of the total is not an outcome.
ROUNDING = 1e-5


@register
@dataclass(frozen=True)
class GRPO(GroupEstimator):
    """Group-relative advantages: `(r - mean) / (std + 1e-4)`.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2; without the division (`scale_rewards=none`) Dr. GRPO's,
    arXiv:2503.20783. std has n - 1 and 1e-4 as in TRL, of the group or of the batch of all ranks. `mad` is 1.4826 times
    the median absolute deviation of the group, which one outlier does not move; the mean stays the baseline, so that
    advantages of a group add up to 0 (MC-GRPO, arXiv:2601.22582, centres on the median as well). If more than half of
    the rewards are equal it is 1.253314 times the mean absolute deviation from the median.

    `token_level=true` is process supervision (section 4.1.3): the sum over s >= t of the step rewards, each normalised
    against all step rewards of the group. The paper has a list of steps; here a step is a token with a dense reward
    that is not 0 (one of exactly 0 cannot be distinguished from none). The rest of the total is the outcome, added to
    the reward of the last token; if any sample of a group has one, those of all its samples count, zeros too. Without
    rewards of tokens this is GRPO.

    `multi_objective_aggregation=normalize_then_sum` is GDPO, arXiv:2601.05242: `(s - mean) / (std + 1e-4)` over the
    batch, s the sum over reward functions k of `weight_k (r_k - mean) / (std + 1e-4)` over the group, so that no
    function drowns the others. Numbers are TRL's: a function that says nothing about a sample counts 0 there; a
    sample that was not scored is in no mean. Refused with `kl=reward`, which is not a function, and with `token_level`.
    """

    estimator: Literal["grpo"] = key("grpo", "the advantage estimator")
    scale_rewards: Literal["group", "batch", "mad", "none"] = key(
        "group",
        "divide centred rewards by the standard deviation of the group or batch, or by a robust estimate of the "
        "group's (mad: median absolute deviation)",
    )
    token_level: bool = key(
        False, "normalise the rewards of single tokens over the group and sum what follows (process supervision)"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = key(
        "sum_then_normalize",
        "several reward functions: their weighted sum is normalised over the group, or each by itself over the group, "
        "and the weighted sum of these over the batch (GDPO)",
    )
    sees_all_ranks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_function and self.token_level:
            raise ConfigError(
                "token_level=true normalises rewards of single tokens, multi_objective_aggregation="
                "normalize_then_sum those of functions for whole completions; leave one of them out"
            )

    @property
    def is_zero_if_alike(self) -> bool:
        """False if rewards of tokens or functions are compared, of which equal sums say nothing."""
        return not self.token_level and self.multi_objective_aggregation == "sum_then_normalize"

    @property
    def by_function(self) -> bool:
        """Whether each reward function is normalised by itself."""
        return self.multi_objective_aggregation == "normalize_then_sum"

    @property
    def needs(self) -> frozenset[Needs]:
        """The functions' rewards, to normalise each."""
        return frozenset({Needs.FUNCTION_REWARDS} if self.by_function else ())

    @property
    def takes_kl_rewards(self) -> bool:
        """Return False if rewards are normalised per function or per step: a KL penalty belongs to no function, and
        would make every token a step."""
        return not (self.by_function or self.token_level)

    @property
    def uses_step_rewards(self) -> bool:
        """True for process supervision."""
        return self.token_level

    @property
    def needs_step_rewards(self) -> bool:
        """True for process supervision."""
        return self.token_level

    @property
    def inert_options(self) -> Mapping[str, str]:
        """scale_rewards, by function."""
        reason = "normalize_then_sum divides by the standard deviations of groups and batch"
        return {"scale_rewards": reason} if self.by_function else {}

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages of whole completions, of reward functions or of steps."""
        if self.token_level:
            return Advantages(self.of_steps(inputs))
        if not self.by_function:
            return super().compute(inputs)
        of_functions, weights = inputs.needed("function_rewards"), inputs.needed("reward_weights")
        (rewards, groups, of_functions), mine = inputs.everywhere(inputs.rewards, inputs.groups, of_functions)
        return Advantages(inputs.per_token(reward_decoupled_advantages(rewards, of_functions, weights, groups)[mine]))

    def of_samples(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Compute the normalised difference, exactly 0 in a group whose rewards are all equal."""
        return group_relative_advantages(rewards, groups, scale_rewards=self.scale_rewards)

    def of_steps(self, inputs: AdvantageInputs) -> Tensor:
        """Compute the sum of the normalised step rewards at each token and after it, float64 [T]. Collective."""
        rows, num_rows = inputs.rows, len(inputs.rewards)
        grouping, token_rewards = Groups.of(inputs.rewards, inputs.groups), inputs.token_rewards.double()
        dense = row_sum(token_rewards, rows, num_rows)
        is_outcome = (grouping.rewards - dense).abs() > ROUNDING * row_sum(token_rewards.abs(), rows, num_rows)
        with_outcome = (grouping.sum(is_outcome) > 0)[grouping.index]
        total = torch.where(grouping.scored, torch.where(with_outcome, grouping.rewards, dense), torch.nan)

        steps = Steps.of(inputs.mask, rows, num_rows)
        earned = steps.take(step_rewards(total, token_rewards, inputs.mask, rows))
        is_step = grouping.scored[steps.rows] & ((earned != 0) | (steps.is_last & with_outcome[steps.rows]))
        (values, owners), mine = inputs.everywhere(earned[is_step], inputs.groups[steps.rows[is_step]])
        terms = torch.zeros_like(earned)
        terms[is_step] = self.of_samples(values, owners)[mine]
        return steps.spread(steps.discounted(terms, 1.0))


def group_relative_advantages(rewards: Tensor, groups: Tensor, *, scale_rewards: str = "group") -> Tensor:
    """Compute GRPO: each reward against the mean of its group, (r - mean) / (std + 1e-4).

    DeepSeekMath, arXiv:2402.03300, section 4.1.2; scale_rewards is that of `GRPO`. Standard deviations are those of a
    sample (n - 1), as in TRL.

    rewards: float [N], NaN if a sample could not be scored; groups: int64 [N]. Returns float64 [N]: 0 for unscored
    samples, for a group whose rewards are all equal (exactly, not up to rounding), and for the only scored sample of a
    group.
    """
    grouping = Groups.of(rewards, groups)
    scale = grouping.scale(scale_rewards)[grouping.index]
    return torch.where(grouping.compared, grouping.centred / scale, 0.0)


def reward_decoupled_advantages(rewards: Tensor, of_functions: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
    """Compute GDPO: each reward function against the mean of its group, (r_k - mean) / (std + 1e-4), then the weighted
    sum of these against that of the batch in the same way, so that no function drowns the others.

    S. Liu et al., arXiv:2601.05242; the constant, the sample standard deviations (n - 1) and what a function that says
    nothing of a sample counts (0, and it is in no mean) are TRL's, multi_objective_aggregation="normalize_then_sum".
    A function that gives a whole group the same adds exactly 0.

    rewards: float [N], the totals, NaN if a sample could not be scored, which says no more than that; of_functions:
    float [N, K], NaN if one says nothing; weights: float [K]; groups: int64 [N]. Returns float64 [N].
    """
    if of_functions.shape != (len(rewards), len(weights)):
        raise ValueError(
            f"function rewards must be [N, K] for {len(rewards)} samples and {len(weights)} weights, not "
            f"{list(of_functions.shape)}"
        )
    unscored = rewards.isnan()
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for weight, values in zip(weights.double(), of_functions.double().unbind(1), strict=True):
        total += weight * group_relative_advantages(values.masked_fill(unscored, torch.nan), groups)
    return group_relative_advantages(total.masked_fill(unscored, torch.nan), torch.zeros_like(groups))
