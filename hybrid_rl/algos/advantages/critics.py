"""Estimators that learn from a critic's values: GAE with one lambda (PPO) or one each for policy and critic (VAPO), and
V-trace for samples of an older policy or of another engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.advantages.group_rewards import whitened
from hybrid_rl.algos.advantages.steps import Steps, step_rewards
from hybrid_rl.algos.columns import check_ascending, check_columns, ratio_of
from hybrid_rl.algos.interface import AdvantageEstimator, AdvantageInputs, Advantages, Needs, register
from hybrid_rl.algos.options import key
from hybrid_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CriticEstimator(AdvantageEstimator):
    """Base of the estimators that learn from a critic's values, with advantages that may be normalised."""

    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    whiten_advantages: bool = key(True, "normalise advantages over all tokens of the batch")
    needs = frozenset({Needs.VALUES})
    tells_tokens_apart = uses_step_rewards = True

    def estimate(self, inputs: AdvantageInputs, lam: float | Tensor) -> tuple[Tensor, Tensor]:
        """Call `generalized_advantages` with these inputs."""
        rewards = step_rewards(inputs.rewards, inputs.token_rewards, inputs.mask, inputs.rows)
        values, num_rows = inputs.needed("values").double(), len(inputs.rewards)
        return generalized_advantages(rewards, values, inputs.mask, inputs.rows, num_rows, gamma=self.gamma, lam=lam)

    def of_scored(self, inputs: AdvantageInputs, advantages: Tensor, returns: Tensor) -> Advantages:
        """Normalise the advantages, and leave samples without a reward with advantages of 0 and the critic's values as
        returns."""
        if self.whiten_advantages:
            advantages = whitened(advantages, inputs.learned, inputs.gather)
        returns = torch.where(inputs.learned, returns, torch.where(inputs.mask, inputs.needed("values").double(), 0.0))
        return Advantages(torch.where(inputs.learned, advantages, 0.0), returns)


@register
@dataclass(frozen=True)
class GAE(CriticEstimator):
    """PPO's advantages from a critic: `A_t = d_t + gamma lam A_{t+1}`, `d_t = r_t + gamma V_{t+1} - V_t`; target A + V.

    arXiv:1506.02438, eq. 16. V after the last token is 0, also if the length limit cut the sample off.
    """

    estimator: Literal["gae"] = key("gae", "the advantage estimator")
    lam: float = key(0.95, "lambda: 1 = returns less values, 0 = errors of single steps", minimum=0, maximum=1)

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages, and returns for the critic."""
        return self.of_scored(inputs, *self.estimate(inputs, self.lam))


@register
@dataclass(frozen=True)
class VAPO(CriticEstimator):
    """Value-model-based augmented PPO: GAE with `lam = max(0, 1 - 1 / (alpha T))` for the policy, T the length of the
    completion; the critic's target has another lambda.

    arXiv:2504.05118. lam = 0 for T <= 1 / alpha, which the paper leaves out.
    """

    estimator: Literal["vapo"] = key("vapo", "the advantage estimator")
    lam_critic: float = key(
        1.0, "lambda of the critic's targets; 1 = the rewards from a token on", minimum=0, maximum=1
    )
    length_adaptive_alpha: float = key(0.05, "lambda of the policy = 1 - 1 / (alpha * length)", above=0)

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages with one lambda, returns with another."""
        lengths = torch.bincount(inputs.rows[inputs.mask], minlength=len(inputs.rewards))
        advantages, _ = self.estimate(inputs, length_adaptive_lambda(lengths, alpha=self.length_adaptive_alpha))
        _, returns = self.estimate(inputs, self.lam_critic)
        return self.of_scored(inputs, advantages, returns)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, rows: Tensor, num_rows: int, *, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute GAE: A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t. Returns A and A +
    V.

    arXiv:1506.02438, eq. 16. Steps are the tokens that the policy made: V_{t+1} and A_{t+1} are those of the next such
    token, whatever the environment put in between, and 0 after the last one, also if a limit cut the completion off.

    rewards: float [T], of each step (`step_rewards`); values: float [T], of the state before the token; mask: bool [T];
    rows: int64 [T], ascending, in 0..num_rows-1; lam: one number, or float [num_rows], one per sample. Both results are
    float64 [T], 0 where masked.
    """
    check_columns(rows=rows, rewards=rewards, values=values, mask=mask)
    check_ascending(rows, num_rows)
    if isinstance(lam, torch.Tensor) and lam.shape != (num_rows,):
        raise ValueError(f"lam must be a number or [{num_rows}], one per sample, not {tuple(lam.shape)}")
    steps = Steps.of(mask, rows, num_rows)
    value = steps.take(values)
    delta = steps.take(rewards) + gamma * steps.next(value) - value
    decay = gamma * (lam.to(torch.float64)[steps.rows] if isinstance(lam, torch.Tensor) else lam)
    advantages = steps.discounted(delta, decay)
    return steps.spread(advantages), steps.spread(advantages + value)


def length_adaptive_lambda(lengths: Tensor, *, alpha: float) -> Tensor:
    """Compute lambda = 1 - 1 / (alpha * length), float64 [N]: the weights of a completion's errors add up to alpha *
    length.

    VAPO, arXiv:2504.05118. Completions of at most 1 / alpha tokens (20 with the paper's .05), for which that is not
    above 0 and which the paper leaves out, get 0. lengths: [N], tokens that the policy made; alpha: above 0.
    """
    if lengths.dim() != 1 or not alpha > 0:
        raise ValueError(f"lengths must be [N] and alpha above 0, not {tuple(lengths.shape)} and {alpha}")
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"lengths are numbers of tokens, but one is {int(lengths.min())}; give 0 or more")
    return (1 - 1 / (alpha * lengths.to(torch.float64).clamp(min=1))).clamp(min=0)


@register
@dataclass(frozen=True)
class VTrace(AdvantageEstimator):
    """V-trace, IMPALA's off-policy correction of a critic: `rho_t (r_t + gamma v_{t+1} - V_t)`; the critic's target is
    `v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})`, `rho = min(rho_clip, p_old /
    p_roll)`, `c = lam min(c_clip, p_old / p_roll)`.

    arXiv:1802.01561, eq. 1, remarks 1 and 2, and section 4.2, with p_old the learner at the start of the training step
    and p_roll the engine that sampled. Steps, and what follows the last one, are as in `gae`. With p_old = p_roll,
    lambda and clips 1 the targets are the returns. The advantages hold the weight rho of the policy gradient already: a
    `correction` of engine to trainer in the loss would count it twice, and is refused.
    """

    estimator: Literal["vtrace"] = key("vtrace", "the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    lam: float = key(1.0, "lambda: factor of c, how far later errors reach back", minimum=0, maximum=1)
    rho_clip: float = key(1.0, "upper bound of the weight of a step's own error: what the critic converges to", above=0)
    c_clip: float = key(
        1.0, "upper bound of the weight of later errors; sets how fast the critic converges; at most rho_clip", above=0
    )
    needs = frozenset({Needs.VALUES, Needs.LOGPROBS, Needs.ROLLOUT_LOGPROBS})
    tells_tokens_apart = uses_step_rewards = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_clip > self.rho_clip:
            raise ConfigError(f"c_clip={self.c_clip} must be at most rho_clip={self.rho_clip} (arXiv:1802.01561)")

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Compute advantages and targets; a sample without a reward has advantages of 0 and the critic's own values."""
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
