"""The optimal token baseline: what a group earns from a position on, weighed by the energy of the path so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages, Needs, register
from hybrid_rl.options import key

ENERGY_FLOOR = 1e-8  # if no path has any energy yet, the baseline is the plain mean


@register
@dataclass(frozen=True)
class OptimalTokenBaseline(AdvantageEstimator):
    """Optimal token baseline: `G_t - sum(G_t W_t) / sum(W_t)` over the samples of the group that reach step t; G_t the
    sum of the rewards from t on, `W_t` = sum up to t of `1 - 2 p + sum_V p^2`.

    arXiv:2602.07078. The terms of W are squared norms of the gradient of ln p with respect to the logits: the energy of
    the path so far. Only tokens that the policy made are steps, so that position t is its t-th own token. A sample that
    reaches t alone is its own baseline, and if all who reach t earn the same there is nothing to tell apart: exactly 0
    in both.
    """

    estimator: Literal["optimal_token_baseline"] = key("optimal_token_baseline", "the advantage estimator")
    needs = frozenset({Needs.LOGPROBS, Needs.SUM_PI_SQUARED})
    min_generations = 2
    tells_tokens_apart = uses_step_rewards = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Rewards to come against the weighted baseline of their position."""
        steps = Steps.of(inputs.mask, inputs.rows, len(inputs.rewards))
        earned = step_rewards(inputs.rewards, inputs.token_rewards, inputs.mask, inputs.rows)
        ahead = steps.discounted(steps.take(earned), 1.0)
        # (1 - p)^2 + the p^2 of other tokens: below 0 by rounding only.
        probabilities, squares = (
            steps.take(inputs.needed("logprobs")).exp(),
            steps.take(inputs.needed("sum_pi_squared")),
        )
        energy = (1 - 2 * probabilities + squares).clamp(min=0)
        weight = steps.accumulated(energy) + ENERGY_FLOOR

        scored = inputs.scored[steps.rows]
        _, group = inputs.groups.unique(return_inverse=True)
        width = int(steps.lengths.max()) if len(steps.lengths) else 0
        _, place = (group[steps.rows] * width + steps.position)[scored].unique(return_inverse=True)
        earned, weight = ahead[scored], weight[scored]
        zeros = earned.new_zeros(int(place.max()) + 1 if len(place) else 0)
        baseline = zeros.index_add(0, place, earned * weight) / zeros.index_add(0, place, weight)
        low = torch.full_like(zeros, torch.inf).scatter_reduce(0, place, earned, "amin")
        high = torch.full_like(zeros, -torch.inf).scatter_reduce(0, place, earned, "amax")
        advantages = torch.zeros_like(ahead)
        advantages[scored] = torch.where((high > low)[place], earned - baseline[place], 0.0)
        return Advantages(steps.spread(advantages))
