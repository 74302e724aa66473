"""GRPO: each reward against its group, for whole completions or step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.groups import Groups, whole_batch
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages, alone
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import key

ROUNDING = 1e-5  # of the dense rewards of a sample, which are float32: what is left of the total below it is no outcome


@dataclass(frozen=True)
class GRPO(AdvantageEstimator):
    """Group-relative advantages (arXiv:2402.03300), and without the division Dr. GRPO's (arXiv:2503.20783)."""

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
    min_generations = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multi_objective_aggregation == "normalize_then_sum":
            if self.token_level:
                raise ConfigError(
                    "token_level=true normalises rewards of single tokens, multi_objective_aggregation="
                    "normalize_then_sum those of functions for whole completions; leave one of them out"
                )
            object.__setattr__(self, "needs", frozenset({"function_rewards"}))
            object.__setattr__(self, "takes_kl_rewards", False)  # no function's reward, so it would not be seen
        if self.token_level:  # a KL penalty would make a step of every token
            object.__setattr__(self, "takes_kl_rewards", False)
            object.__setattr__(self, "uses_step_rewards", True)
            object.__setattr__(self, "needs_step_rewards", True)

    @property
    def inert_options(self) -> Mapping[str, str]:
        """See Record."""
        if self.multi_objective_aggregation == "sum_then_normalize":
            return {}
        return {"scale_rewards": "normalize_then_sum divides by the standard deviations of groups and batch"}

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator. The standard deviation of the batch is that of all ranks."""
        if self.multi_objective_aggregation == "normalize_then_sum":
            of_functions, weights = inputs.needed("function_rewards"), inputs.needed("reward_weights")
            whole = inputs.gather((inputs.rewards, inputs.groups, of_functions))
            rewards, groups, of_functions = (torch.cat(parts) for parts in zip(*whole, strict=True))
            start = sum(len(mine) for mine, *_ in whole[: inputs.rank])
            found = reward_decoupled_advantages(rewards, of_functions, weights, groups)
            return Advantages(inputs.per_token(found[start : start + len(inputs.rewards)]))
        if not self.token_level:
            return whole_batch(inputs, lambda r, g: group_relative_advantages(r, g, scale_rewards=self.scale_rewards))
        advantages = process_advantages(
            inputs.rewards,
            inputs.token_rewards,
            inputs.groups,
            inputs.mask,
            inputs.rows,
            scale_rewards=self.scale_rewards,
            gather=inputs.gather,
            rank=inputs.rank,
        )
        return Advantages(advantages)


def group_relative_advantages(rewards: Tensor, groups: Tensor, *, scale_rewards: str = "group") -> Tensor:
    """GRPO: each reward against the mean of its group, (r - mean) / (std + 1e-4).

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. scale_rewards="none" leaves the division out (Dr. GRPO,
    arXiv:2503.20783); "batch" divides by the standard deviation over all samples; "mad" by 1.4826 times the median
    absolute deviation of the group, which one outlier does not move (`Groups.robust_std`; the mean stays the baseline,
    so that advantages of a group add up to 0; MC-GRPO, arXiv:2601.22582, centres on the median as well). Standard
    deviations are those of a sample (n - 1), as in TRL.

    rewards: float [N], NaN where a sample could not be scored; groups: int64 [N]. Returns float64 [N]: 0 for unscored
    samples, for a group whose rewards are all equal (exactly, not up to rounding), and for one scored sample alone.
    """
    found = Groups.of(rewards, groups)
    scale = found.scale(scale_rewards)[found.index]
    centred = found.rewards - found.mean(found.rewards)[found.index]
    return torch.where(found.compared, centred / scale, torch.zeros_like(centred))


def reward_decoupled_advantages(rewards: Tensor, of_functions: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
    """GDPO: each reward function against the mean of its group, (r_k - mean) / (std + 1e-4), then the weighted sum of
    these against that of the batch in the same way, so that no function drowns the others.

    S. Liu et al., arXiv:2601.05242; the constant, the sample standard deviations (n - 1) and what a function that says
    nothing of a sample counts (0, and it is in no mean) are TRL's, multi_objective_aggregation="normalize_then_sum".
    A function that gives a whole group the same adds exactly 0.

    rewards: float [N], the totals, NaN where a sample could not be scored, which says no more than that; of_functions:
    float [N, K], NaN where one says nothing; weights: float [K]; groups: int64 [N]. Returns float64 [N].
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


def process_advantages(
    rewards: Tensor,
    token_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    rows: Tensor,
    *,
    scale_rewards: str = "group",
    gather: Callable[[Any], list[Any]] = alone,
    rank: int = 0,
) -> Tensor:
    """GRPO with process supervision: A_t = sum of the normalised rewards at t and after it.

    DeepSeekMath, arXiv:2402.03300, section 4.1.3: all step rewards of a group are normalised together, each against
    their mean and standard deviation, as `group_relative_advantages` does it. The paper has a list of steps; here a
    step reward is one at a token that is not 0 (one of exactly 0 cannot be told from none). What `rewards` holds beside
    them is the outcome, added to the reward of the last token; where any sample of a group has one, those of all its
    samples count, zeros too. Without rewards of tokens this is GRPO.

    rewards: float [N], totals, NaN where not scored; token_rewards: float [T]; groups: int64 [N]; mask: bool [T]; rows:
    int64 [T], ascending. gather, rank: see AdvantageInputs; scale_rewards="batch" is over the rewards of all ranks.
    Returns float64 [T].
    """
    found, num_rows = Groups.of(rewards, groups), len(rewards)
    token_rewards = token_rewards.double()
    dense = row_sum(token_rewards, rows, num_rows)
    is_outcome = (found.rewards - dense).abs() > ROUNDING * row_sum(token_rewards.abs(), rows, num_rows)
    with_outcome = (found.sum(is_outcome) > 0)[found.index]
    total = torch.where(found.scored, torch.where(with_outcome, found.rewards, dense), torch.nan)

    steps = Steps.of(mask, rows, num_rows)
    earned = steps.take(step_rewards(total, token_rewards, mask, rows))
    is_step = found.scored[steps.rows] & ((earned != 0) | (steps.is_last & with_outcome[steps.rows]))
    mine = (earned[is_step], groups[steps.rows[is_step]])
    everywhere = gather(mine)
    values, owners = (torch.cat(parts) for parts in zip(*everywhere, strict=True))
    start = sum(len(part) for part, _ in everywhere[:rank])
    normalised = group_relative_advantages(values, owners, scale_rewards=scale_rewards)[start : start + len(mine[0])]
    terms = torch.zeros_like(earned)
    terms[is_step] = normalised
    return steps.spread(steps.discounted(terms, 1.0))
