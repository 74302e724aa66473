"""The optimal token baseline: what a group earns from a position on, weighed by the energy of the path so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.steps import Steps, check_steps, step_rewards
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.options import key

ENERGY_FLOOR = 1e-8  # where no path has any energy yet, the baseline is the plain mean


@dataclass(frozen=True)
class OptimalTokenBaseline(AdvantageEstimator):
    """Rewards from a token on against a baseline per position, weighed by realised energy (arXiv:2602.07078)."""

    estimator: Literal["optimal_token_baseline"] = key("optimal_token_baseline", "the advantage estimator")
    needs = frozenset({"logprobs", "sum_pi_squared"})
    min_generations = 2
    tells_tokens_apart = uses_step_rewards = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        advantages = optimal_token_advantages(
            inputs.rewards,
            inputs.token_rewards,
            inputs.groups,
            inputs.needed("logprobs"),
            inputs.needed("sum_pi_squared"),
            inputs.mask,
            inputs.rows,
        )
        return Advantages(advantages)


def optimal_token_advantages(
    rewards: Tensor,
    token_rewards: Tensor,
    groups: Tensor,
    logprobs: Tensor,
    sum_pi_squared: Tensor,
    mask: Tensor,
    rows: Tensor,
) -> Tensor:
    """OTB: A_t = G_t - B_t, with B_t = sum(G_t W_t) / sum(W_t) over the samples of the group that reach step t.

    arXiv:2602.07078. G_t is the sum of the rewards from step t on; W_t = sum over j <= t of (1 - 2 p_j + sum over the
    vocabulary of p^2), the squared norm of the gradient of ln p_j with respect to the logits, summed over the path.
    Only tokens that the policy made are steps, so that position t is its t-th own token. A sample that reaches t alone
    is its own baseline, and where all who reach t earn the same there is nothing to tell apart: exactly 0 in both.

    rewards: float [N], totals, NaN where not scored; groups: int64 [N]; token_rewards, logprobs (ln p of the token),
    sum_pi_squared: float [T]; mask: bool [T]; rows: int64 [T], ascending. Returns float64 [T].
    """
    columns = {"token_rewards": token_rewards, "logprobs": logprobs, "sum_pi_squared": sum_pi_squared}
    check_steps(len(rewards), rows=rows, mask=mask, **columns)
    steps = Steps.of(mask, rows, len(rewards))
    ahead = steps.discounted(steps.take(step_rewards(rewards, token_rewards, mask, rows)), 1.0)
    # (1 - p)^2 + the p^2 of other tokens: below 0 by rounding only.
    energy = (1 - 2 * steps.take(logprobs).exp() + steps.take(sum_pi_squared)).clamp(min=0)
    weight = steps.accumulated(energy) + ENERGY_FLOOR

    scored = ~rewards.isnan()[steps.rows]
    _, group = groups.unique(return_inverse=True)
    width = int(steps.lengths.max()) if len(steps.lengths) else 0
    _, place = (group[steps.rows] * width + steps.position)[scored].unique(return_inverse=True)
    earned, weight = ahead[scored], weight[scored]
    zeros = earned.new_zeros(int(place.max()) + 1 if len(place) else 0)
    baseline = zeros.index_add(0, place, earned * weight) / zeros.index_add(0, place, weight)
    low = torch.full_like(zeros, torch.inf).scatter_reduce(0, place, earned, "amin")
    high = torch.full_like(zeros, -torch.inf).scatter_reduce(0, place, earned, "amax")
    advantages = torch.zeros_like(ahead)
    advantages[scored] = torch.where((high > low)[place], earned - baseline[place], 0.0)
    return steps.spread(advantages)
