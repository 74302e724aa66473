"""V-trace: targets of the critic and advantages from samples of an older policy, or of another engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages, Needs, register
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import key


@register
@dataclass(frozen=True)
class VTrace(AdvantageEstimator):
    """V-trace, IMPALA's off-policy correction of a critic: `rho_t (r_t + gamma v_{t+1} - V_t)`; the critic's target is
    `v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})`, `rho = min(rho_clip, p_old /
    p_roll)`, `c = lam min(c_clip, p_old / p_roll)`.

    arXiv:1802.01561, eq. 1, remarks 1 and 2, and section 4.2, with p_old the learner at the start of the training step
    and p_roll the engine that sampled. Steps, and what follows the last one, are as in `gae`. With p_old = p_roll,
    lambda and clips 1 the targets are the returns. The advantages hold the weight rho of the policy gradient already: a
    `correction` of engine to trainer in the loss besides would count it twice, and is refused.
    """

    estimator: Literal["vtrace"] = key("vtrace", "the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    lam: float = key(1.0, "lambda: factor of c, how far later errors reach back", minimum=0, maximum=1)
    rho_clip: float = key(1.0, "upper bound of the weight of a step's own error: what the critic converges to", above=0)
    c_clip: float = key(1.0, "upper bound of the weight of later errors: how fast it does; at most rho_clip", above=0)
    needs = frozenset({Needs.VALUES, Needs.LOGPROBS, Needs.ROLLOUT_LOGPROBS})
    tells_tokens_apart = uses_step_rewards = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_clip > self.rho_clip:
            raise ConfigError(f"c_clip={self.c_clip} must be at most rho_clip={self.rho_clip} (arXiv:1802.01561)")

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Advantages and targets; a sample without a reward has advantages of 0 and the critic's own values."""
        mask, gamma, values = inputs.mask, self.gamma, inputs.needed("values")
        steps = Steps.of(mask, inputs.rows, len(inputs.rewards))
        reward = steps.take(step_rewards(inputs.rewards, inputs.token_rewards, mask, inputs.rows))
        value = steps.take(values)
        ratio = ratio_of(steps.take(inputs.needed("logprobs")) - steps.take(inputs.needed("rollout_logprobs")))
        rho, c = ratio.clamp(max=self.rho_clip), self.lam * ratio.clamp(max=self.c_clip)
        error = rho * (reward + gamma * steps.next(value) - value)
        targets = value + steps.discounted(error, gamma * c)
        advantages = rho * (reward + gamma * steps.next(targets) - value)
        own = torch.where(mask, values.double(), 0.0)
        return Advantages(
            torch.where(inputs.learned, steps.spread(advantages), 0.0),
            torch.where(inputs.learned, steps.spread(targets), own),
        )
