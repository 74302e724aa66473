"""Advantages of a rank's samples: columns of a batch to the inputs of an estimator, and its results to columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algos import AdvantageEstimator, AdvantageInputs, Advantages, KLTerm, Needs
from hybrid_rl.algos.kl import KLInReward, NoKL, kl_reward
from hybrid_rl.batch import Batch, Trajectories
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import DataError

# Losses, and the squares that a gradient norm is summed from, are float32: beyond this the norm would not be finite,
# and every update be skipped.
LARGEST_ADVANTAGE = 1e12


@dataclass(frozen=True)
class AdvantageSpec:
    """How advantages are made: the estimator, a KL penalty in the reward, and the weights of the user's reward
    functions, empty for 1 each."""

    estimator: AdvantageEstimator
    kl: KLTerm = NoKL()  # noqa: RUF009
    reward_weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: TrainerConfig) -> AdvantageSpec:
        """Take the values from a resolved configuration."""
        return cls(config.advantage, config.kl, tuple(config.rewards.reward_weights or ()))


def with_advantages(batch: Batch, spec: AdvantageSpec, context: RankContext, beta: float) -> Batch:
    """Add advantages, one per completion token, and returns if there is a critic; needs whole groups. Collective.

    An estimator sees trajectories: their turns side by side are one row of tokens, with one reward. A group counts each
    trajectory once, and what follows the last token of a turn is the first of the next. beta: present weight of a KL
    penalty in the reward. Raises DataError for advantages or returns that are not numbers, or too large for gradients
    in float32.
    """
    trajectories = Trajectories.of(batch)
    if not trajectories.are_in_order:
        in_order = with_advantages(batch.select(trajectories.order), spec, context, beta)
        return in_order.select(trajectories.order.argsort())
    inputs = advantage_inputs(batch, spec, context, beta)
    columns = _checked_columns(spec.estimator.compute(inputs), inputs, type(spec.estimator).__name__)
    completions = batch["completion_ids"]
    return batch.with_columns(
        # A token that no policy made gets 0, so that it cannot harm a loss that the user wrote.
        **{name: completions.with_values(torch.where(inputs.mask, c, 0.0).float()) for name, c in columns.items()}
    )


def _checked_columns(found: Any, inputs: AdvantageInputs, name: str) -> dict[str, Tensor]:
    """Return what an estimator, which may be the user's own, gave, by name of the column.

    Raises TypeError or ValueError if it gave something else than a number per token, DataError if the number of a
    scored sample is one that no gradient can be made of.
    """
    if not isinstance(found, Advantages):
        raise TypeError(f"{name}.compute gave a {type(found).__name__}; it must return a hybrid_rl.algos.Advantages")
    outputs = {"advantages": found.advantages, "returns": found.returns}
    columns = {column_name: column for column_name, column in outputs.items() if column is not None}
    for column_name, column in columns.items():
        if column.shape != inputs.rows.shape:
            raise ValueError(
                f"{name}.compute gave {column_name} of shape {list(column.shape)}; it must be [{len(inputs.rows)}], "
                f"one number per completion token (AdvantageInputs.per_token spreads numbers of samples)"
            )
        bad = inputs.mask & inputs.scored[inputs.rows] & ~(column.abs() <= LARGEST_ADVANTAGE)
        if bool(bad.any()):
            token = int(bad.nonzero()[0, 0])
            reward = float(inputs.rewards[inputs.rows[token]])
            raise DataError(
                f"{name}.compute gave {column_name} of {float(column[token]):.4g} for a completion with the reward "
                f"{reward:.4g}; they must be numbers of at most {LARGEST_ADVANTAGE:g}, beyond which gradients "
                "overflow. Scale the rewards (reward_weights), normalise them (advantage.scale_rewards), or look for "
                "logprobs and values that are not finite"
            )
    return columns


def advantage_inputs(batch: Batch, spec: AdvantageSpec, context: RankContext, beta: float) -> AdvantageInputs:
    """Return the columns of a batch in float64, one row for each trajectory, its turns side by side. A KL penalty in
    the reward is added to the rewards of tokens and trajectories.

    Raises DataError for turns of one trajectory with different rewards, and for a penalty that is not finite.
    """
    completions = batch["completion_ids"]
    trajectories = Trajectories.of(batch)
    first = trajectories.first
    rows, mask = trajectories.index[completions.row_index()], batch["completion_mask"].values

    def values(name: str) -> Tensor | None:
        return batch[name].values.double() if name in batch else None

    dense, logprobs, reference = values("token_rewards"), values("old_logprobs"), values("ref_logprobs")
    token_rewards = torch.zeros(len(rows), dtype=torch.float64) if dense is None else dense
    rewards = _rewards_of_trajectories(batch, trajectories)
    if isinstance(spec.kl, KLInReward):
        assert logprobs is not None and reference is not None
        penalty = kl_reward(logprobs, reference, mask, beta, spec.kl.kl_estimator)
        if not bool(penalty.isfinite().all()):
            token = int((~penalty.isfinite()).nonzero()[0, 0])
            raise DataError(
                f"kl=reward: the penalty of a token is {float(penalty[token])}, with ln p = "
                f"{float(logprobs[token]):.4g} of the policy and {float(reference[token]):.4g} of the reference; look "
                "for logits of -inf or NaN"
            )
        token_rewards = token_rewards + penalty
        rewards = rewards + torch.zeros_like(rewards).index_add(0, rows, penalty)
    return AdvantageInputs(
        rewards=rewards,
        groups=batch["group"][first],
        rows=rows,
        mask=mask,
        token_rewards=token_rewards,
        rollout_logprobs=values("rollout_logprobs"),
        logprobs=logprobs,
        ref_logprobs=reference,
        teacher_logprobs=values("teacher_logprobs"),
        values=values("values"),
        sum_pi_squared=values("sum_pi_squared"),
        baseline_rewards=batch["baseline_rewards"][first] if "baseline_rewards" in batch else None,
        **_rewards_of_functions(batch, first, spec),
        gather=context.data_gather,
        rank=context.data_rank,
    )


def _rewards_of_trajectories(batch: Batch, found: Trajectories) -> Tensor:
    """Return the reward of each trajectory, float64 [M]. Raises DataError if its turns do not agree."""
    rewards: Tensor = batch["rewards"]
    theirs = rewards[found.first]
    differ = (rewards != theirs[found.index]) & ~(rewards.isnan() & theirs.isnan()[found.index])
    if bool(differ.any()):
        sample = int(differ.nonzero()[0, 0])
        raise DataError(
            f"the turns of trajectory {int(batch['trajectory'][sample])} have the rewards "
            f"{float(theirs[found.index[sample]]):g} and {float(rewards[sample]):g}; a trajectory has one reward, the "
            "sum over its turns: give it to each of them, and rewards of single tokens as token_rewards"
        )
    return theirs


def _rewards_of_functions(batch: Batch, first: Tensor, spec: AdvantageSpec) -> dict[str, Tensor]:
    """Return what each reward function gave a trajectory, and its weight, 1 for those that the configuration added;
    nothing for an estimator that does not need them."""
    if Needs.FUNCTION_REWARDS not in spec.estimator.needs:
        return {}
    values = torch.tensor(batch["function_rewards"], dtype=torch.float64).view(batch.num_samples, -1)[first]
    weights = [*spec.reward_weights, *([1.0] * (values.shape[1] - len(spec.reward_weights)))]
    return {"function_rewards": values, "reward_weights": torch.tensor(weights, dtype=torch.float64)}
