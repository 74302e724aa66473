"""REINFORCE++: returns without a critic, normalised over all tokens of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.groups import Groups
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.advantages.whitening import whitened
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.options import key


@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageEstimator):
    """The rewards from a token on, normalised over all tokens of the batch (arXiv:2501.03262)."""

    estimator: Literal["reinforce_plus_plus"] = key("reinforce_plus_plus", "the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    uses_step_rewards = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma < 1:
            object.__setattr__(self, "tells_tokens_apart", True)

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator. The paper's KL penalty per token comes in with token_rewards (kl=reward)."""
        returns = returns_to_go(inputs.rewards, inputs.token_rewards, inputs.mask, inputs.rows, gamma=self.gamma)
        return Advantages(whitened(returns, inputs.mask & inputs.scored[inputs.rows], inputs.gather))


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """Rewards less their group's mean, normalised over all tokens of the batch (arXiv:2501.03262)."""

    estimator: Literal["reinforce_plus_plus_baseline"] = key("reinforce_plus_plus_baseline", "the advantage estimator")
    min_generations = 2

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        centred = inputs.per_token(centred_rewards(inputs.rewards, inputs.groups))
        return Advantages(whitened(centred, inputs.mask & inputs.scored[inputs.rows], inputs.gather))


def returns_to_go(rewards: Tensor, token_rewards: Tensor, mask: Tensor, rows: Tensor, *, gamma: float) -> Tensor:
    """G_t = sum over the steps s >= t of gamma^(s - t) r_s, before normalisation.

    REINFORCE++, arXiv:2501.03262, with gamma = 1: r(completion) - beta * sum of the KL from t on. Steps are the
    tokens that the policy made; what lies between them does not discount.

    rewards: float [N], totals, NaN where not scored; token_rewards: float [T], the part of single tokens; mask: bool
    [T]; rows: int64 [T], ascending. Returns float64 [T]: 0 where masked or not scored.
    """
    steps = Steps.of(mask, rows, len(rewards))
    earned = steps.take(step_rewards(rewards, token_rewards, mask, rows))
    return steps.spread(steps.discounted(earned, gamma))


def centred_rewards(rewards: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE++-baseline before normalisation: total rewards less the mean of their group, arXiv:2501.03262.

    What it is normalised over the paper leaves open: here over tokens, as without the baseline, so that it is the mean
    of the loss's own terms that is 0. A group whose rewards are all equal gives exactly 0 before normalisation, and a
    scored sample alone too. rewards: float [N], NaN where not scored; groups: int64 [N]. Returns float64 [N].
    """
    found = Groups.of(rewards, groups)
    return torch.where(found.compared, found.rewards - found.mean(found.rewards)[found.index], 0.0)
