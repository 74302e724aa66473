"""Generalised advantage estimation, with one lambda (PPO) or one each for policy and critic (VAPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.advantages.steps import Steps, check_steps, step_rewards
from hybrid_rl.algos.advantages.whitening import whitened
from hybrid_rl.algos.inputs import AdvantageInputs, Advantages
from hybrid_rl.algos.records import AdvantageEstimator
from hybrid_rl.options import key


@dataclass(frozen=True)
class GAE(AdvantageEstimator):
    """PPO's advantages from a critic (arXiv:1506.02438)."""

    estimator: Literal["gae"] = key("gae", "the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    lam: float = key(0.95, "lambda: 1 = returns less values, 0 = errors of single steps", minimum=0, maximum=1)
    whiten_advantages: bool = key(True, "normalise advantages over all tokens of the batch")
    needs = frozenset({"values"})
    tells_tokens_apart = uses_step_rewards = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        values, rewards = _values_and_rewards(inputs)
        advantages, returns = generalized_advantages(
            rewards, values, inputs.mask, inputs.rows, len(inputs.rewards), gamma=self.gamma, lam=self.lam
        )
        return _of_scored(inputs, advantages, returns, values, self.whiten_advantages)


@dataclass(frozen=True)
class VAPO(AdvantageEstimator):
    """GAE with lambda by length for the policy, and one of its own for the critic (arXiv:2504.05118)."""

    estimator: Literal["vapo"] = key("vapo", "the advantage estimator")
    gamma: float = key(1.0, "discount of a reward per token", minimum=0, maximum=1)
    lam_critic: float = key(
        1.0, "lambda of the critic's targets; 1 = the rewards from a token on", minimum=0, maximum=1
    )
    length_adaptive_alpha: float = key(0.05, "lambda of the policy = 1 - 1 / (alpha * length)", above=0)
    whiten_advantages: bool = key(True, "normalise advantages over all tokens of the batch")
    needs = frozenset({"values"})
    tells_tokens_apart = uses_step_rewards = True

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """See AdvantageEstimator."""
        values, rewards = _values_and_rewards(inputs)
        num_rows = len(inputs.rewards)
        lengths = torch.bincount(inputs.rows[inputs.mask], minlength=num_rows)
        lam = length_adaptive_lambda(lengths, alpha=self.length_adaptive_alpha)
        advantages, _ = generalized_advantages(
            rewards, values, inputs.mask, inputs.rows, num_rows, gamma=self.gamma, lam=lam
        )
        _, returns = generalized_advantages(
            rewards, values, inputs.mask, inputs.rows, num_rows, gamma=self.gamma, lam=self.lam_critic
        )
        return _of_scored(inputs, advantages, returns, values, self.whiten_advantages)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, rows: Tensor, num_rows: int, *, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """GAE: A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t. Returns A and A + V.

    arXiv:1506.02438, eq. 16. Steps are the tokens that the policy made: V_{t+1} and A_{t+1} are those of the next such
    token, whatever the environment put in between, and 0 after the last one, also where a limit cut the completion off.

    rewards: float [T], of each step (`step_rewards`); values: float [T], of the state before the token; mask: bool [T];
    rows: int64 [T], ascending, in 0..num_rows-1; lam: one number, or float [num_rows], one per sample. Both results are
    float64 [T], 0 where masked.
    """
    check_steps(num_rows, rows=rows, rewards=rewards, values=values, mask=mask)
    if isinstance(lam, Tensor) and lam.shape != (num_rows,):
        raise ValueError(f"lam must be a number or [{num_rows}], one per sample, not {tuple(lam.shape)}")
    steps = Steps.of(mask, rows, num_rows)
    value = steps.take(values)
    delta = steps.take(rewards) + gamma * steps.next(value) - value
    decay = gamma * (lam.to(torch.float64)[steps.rows] if isinstance(lam, Tensor) else lam)
    advantages = steps.discounted(delta, decay)
    return steps.spread(advantages), steps.spread(advantages + value)


def length_adaptive_lambda(lengths: Tensor, *, alpha: float) -> Tensor:
    """lambda = 1 - 1 / (alpha * length), float64 [N]: the weights of a completion's errors add up to alpha * length.

    VAPO, arXiv:2504.05118. Completions of at most 1 / alpha tokens (20 with the paper's .05), for which
    that is not above 0 and which the paper leaves out, get 0. lengths: [N], tokens that the policy made.
    """
    if lengths.dim() != 1 or not alpha > 0:
        raise ValueError(f"lengths must be [N] and alpha above 0, not {tuple(lengths.shape)} and {alpha}")
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"lengths are numbers of tokens, but one is {int(lengths.min())}; give 0 or more")
    return (1 - 1 / (alpha * lengths.to(torch.float64).clamp(min=1))).clamp(min=0)


def _values_and_rewards(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    rewards = step_rewards(inputs.rewards, inputs.token_rewards, inputs.mask, inputs.rows)
    return inputs.needed("values").double(), rewards


def _of_scored(
    inputs: AdvantageInputs, advantages: Tensor, returns: Tensor, values: Tensor, whiten_advantages: bool
) -> Advantages:
    """Without a reward there is nothing to learn: advantages are 0, and returns what the critic says already."""
    keep = inputs.mask & inputs.scored[inputs.rows]
    if whiten_advantages:
        advantages = whitened(advantages, keep, inputs.gather)
    returns = torch.where(keep, returns, torch.where(inputs.mask, values, 0.0))
    return Advantages(torch.where(keep, advantages, 0.0), returns)
