"""What a rollout shows: rewards, of each dataset too, and how often each prompt was solved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_rl.batch import AnyBatch, Trajectories
from hybrid_rl.data.mixture import DATASET_COLUMN
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.metrics.metric_sums import mean_and_std
from hybrid_rl.rollout.refill import GroupRewards
from hybrid_rl.rollout.successes import SuccessRule


def success_rates(batch: AnyBatch, rule: SuccessRule) -> list[float]:
    """Return how often each group of a batch was solved, in the order of the groups.

    rule: what counts; without a threshold the mean of the values, which is the same if they are 0 and 1. NaN for a
    group to which its functions apply nowhere, or that has no rewards.
    """
    first, threshold = Trajectories.of(batch).first, rule.threshold
    values = rule.values(batch)
    group, num_groups = _groups(batch, first)
    known = ~values.isnan()
    won = values if threshold is None else (values >= threshold).double()
    total = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group[known], won[known])
    count = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group[known], known[known].double())
    rates: list[float] = (total / count).tolist()  # 0 / 0 is NaN
    return rates


def dataset_metrics(rows: Sequence[PromptRow], batch: AnyBatch) -> dict[str, float]:
    """Return metrics for each of several datasets, under `data/<name>/`; none if there is one without a name.

    rows: the prompts of the batch's groups, in their order. share: of the prompts; reward: mean over the samples;
    frac_reward_zero_std: share of groups whose rewards are all equal.
    """
    names = [row.columns.get(DATASET_COLUMN) for row in rows]
    if not rows or any(DATASET_COLUMN not in row.columns for row in rows):
        return {}
    first = Trajectories.of(batch).first
    group, _ = _groups(batch, first)
    rewards = batch["rewards"][first]
    has_signal = GroupRewards.of(rewards, batch["group"][first]).has_signal
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(names):
        mine = torch.tensor([other == name for other in names])
        metrics[f"data/{name}/share"] = float(mine.double().mean())
        metrics[f"data/{name}/reward"] = mean_and_std(rewards[mine[group]])[0]
        metrics[f"data/{name}/frac_reward_zero_std"] = float((~has_signal[mine]).double().mean())
    return metrics


def reward_metrics(batch: AnyBatch, names: Sequence[str]) -> dict[str, float]:
    """Return metrics of the rewards of a batch of whole groups, every trajectory counted once. names: of the reward
    functions."""
    metrics: dict[str, float] = {}
    first = Trajectories.of(batch).first
    values = torch.tensor(batch["function_rewards"], dtype=torch.float64).view(batch.num_samples, len(names))[first]
    for name, column in zip(names, values.T, strict=True):
        metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = mean_and_std(column)
    rewards = batch["rewards"][first]
    metrics["reward"], metrics["reward_std"] = mean_and_std(rewards)
    metrics["frac_reward_zero_std"] = float(
        (~GroupRewards.of(rewards, batch["group"][first]).has_signal).double().mean()
    )
    metrics |= {"rewards/num_failed": float(rewards.isnan().sum()), "rewards/num_retried": 0.0}
    return metrics


def baseline_metrics(batch: AnyBatch) -> dict[str, float]:
    """Return metrics of the greedy baseline of a batch, every prompt counted once."""
    first = torch.tensor([rows[0] for rows in batch.group_rows()])
    return {"baseline/reward": mean_and_std(batch["baseline_rewards"][first])[0]}


def _groups(batch: AnyBatch, first: Tensor) -> tuple[Tensor, int]:
    """Return the place of each trajectory's group (int64 [M]) and their number."""
    ids, group = batch["group"][first].unique(return_inverse=True)
    return group, len(ids)
