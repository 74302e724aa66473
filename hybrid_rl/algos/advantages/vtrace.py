"""V-trace: targets of the critic and advantages from samples of an older policy, or of another engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.steps import Steps, check_steps, step_rewards
from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import key


@dataclass(frozen=True)
class VTrace(AdvantageEstimator):
    """IMPALA's off-policy correction of a critic (arXiv:1802.01561).

    Its advantages hold the weight rho of the policy gradient already: a correction of engine to trainer in the loss
    besides would count it twice.
    """

    estimator: Literal["vtrace"] = key("vtrace", "the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    lam: float = key(1.0, "lambda: factor of c, how far later errors reach back", minimum=0, maximum=1)
    rho_clip: float = key(1.0, "upper bound of the weight of a step's own error: what the critic converges to", above=0)
    c_clip: float = key(1.0, "upper bound of the weight of later errors: how fast it does; at most rho_clip", above=0)
    needs = frozenset({"values", "logprobs", "rollout_logprobs"})
    tells_tokens_apart = uses_step_rewards = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_clip > self.rho_clip:
            raise ConfigError(f"c_clip={self.c_clip} must be at most rho_clip={self.rho_clip} (arXiv:1802.01561)")

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        values = inputs.needed("values")
        advantages, targets = vtrace(
            step_rewards(inputs.rewards, inputs.token_rewards, inputs.mask, inputs.rows),
            values,
            inputs.needed("logprobs"),
            inputs.needed("rollout_logprobs"),
            inputs.mask,
            inputs.rows,
            len(inputs.rewards),
            gamma=self.gamma,
            lam=self.lam,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
        )
        keep = inputs.mask & inputs.scored[inputs.rows]
        own = torch.where(inputs.mask, values.double(), 0.0)
        return Advantages(torch.where(keep, advantages, 0.0), torch.where(keep, targets, own))


def vtrace(
    rewards: Tensor,
    values: Tensor,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    gamma: float,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Advantages rho_t (r_t + gamma v_{t+1} - V_t) and targets v_t of the critic.

    IMPALA, arXiv:1802.01561, eq. 1, remarks 1 and 2, and section 4.2:

        v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1}),
        rho_t = min(rho_clip, pi / mu),    c_t = lambda min(c_clip, pi / mu),

    with pi the learner at the start of the training step and mu the engine that sampled. Steps, and what follows the
    last one, are as in `generalized_advantages`. With pi = mu, lambda and clips 1 the targets are the returns.

    rewards: float [T], of each step (`step_rewards`); values, logprobs, rollout_logprobs: float [T]; mask: bool [T];
    rows: int64 [T], ascending, in 0..num_rows-1. Both results are float64 [T], 0 where masked.
    """
    columns = {"values": values, "logprobs": logprobs, "rollout_logprobs": rollout_logprobs}
    check_steps(num_rows, rows=rows, rewards=rewards, mask=mask, **columns)
    steps = Steps.of(mask, rows, num_rows)
    reward, value = steps.take(rewards), steps.take(values)
    ratio = ratio_of(steps.take(logprobs) - steps.take(rollout_logprobs))
    rho, c = ratio.clamp(max=rho_clip), lam * ratio.clamp(max=c_clip)
    error = rho * (reward + gamma * steps.next(value) - value)
    targets = value + steps.discounted(error, gamma * c)
    advantages = rho * (reward + gamma * steps.next(targets) - value)
    return steps.spread(advantages), steps.spread(targets)
