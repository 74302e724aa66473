"""REINFORCE++: returns without a critic, normalised over all tokens of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_rl.algos.advantages.groups import Groups, whitened
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages, register
from hybrid_rl.options import key


@register
@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++: `whiten(sum over s >= t of gamma^(s-t) r_s)` over all tokens of the batch.

    arXiv:2501.03262, with gamma = 1: r(completion) - beta * sum of the KL from t on; the paper's KL is `kl=reward`.
    Steps are the tokens that the policy made; what lies between them does not discount.
    """

    estimator: Literal["reinforce_plus_plus"] = key("reinforce_plus_plus", "the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    uses_step_rewards = True

    @property
    def tells_tokens_apart(self) -> bool:
        """True with a discount."""
        return self.gamma < 1

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Normalised returns."""
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
    normalisation, and a sample that is scored alone too.
    """

    estimator: Literal["reinforce_plus_plus_baseline"] = key("reinforce_plus_plus_baseline", "the advantage estimator")
    min_generations = 2

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Normalised differences."""
        found = Groups.of(inputs.rewards, inputs.groups)
        centred = inputs.per_token(torch.where(found.compared, found.centred, 0.0))
        return Advantages(whitened(centred, inputs.learned, inputs.gather))
