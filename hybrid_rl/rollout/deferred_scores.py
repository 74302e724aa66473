"""Late scores: those of judges and reward models, which come once all samples are finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hybrid_rl.batch import Batch, Trajectories
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.rewards import RewardFailure, RewardRunner
from hybrid_rl.rewards.results import THE_AGENT, total_rewards


@dataclass(frozen=True)
class LateScores:
    """values: place in reward_funcs -> a score of each trajectory of the batch, in order of first appearance, None if
    it has none: judges and reward models see only the last turn, whose prompt holds the turns before it. failures: of
    samples that could not be scored. logged: numbers for the log."""

    values: Mapping[int, Sequence[float | None]]
    failures: Sequence[RewardFailure] = ()
    logged: MetricSums = field(default_factory=MetricSums)


def failed_before(failures: Iterable[RewardFailure]) -> set[int]:
    """Return the trajectories that failed before there was a completion to be scored."""
    return {failure.key.trajectory for failure in failures if failure.function == THE_AGENT}


def merge_late(
    batch: Batch, failures: Sequence[RewardFailure], rewards: RewardRunner, late: LateScores
) -> tuple[Batch, list[RewardFailure]]:
    """Return the batch with these scores in function_rewards and, once no place is missing, in rewards; and all
    failures.

    failures: those of the batch so far. A trajectory that anything failed on has no reward, and no token rewards; one
    that failed before it had a completion has no late scores either. With judges and reward models both, the reward
    models' scores come last.
    """
    merged = [*failures, *late.failures]
    trajectories = Trajectories.of(batch)
    first = trajectories.first.numpy()
    values = np.array(batch["function_rewards"], dtype=np.float64).reshape(batch.num_samples, len(rewards.names))[first]
    unmade = failed_before(failures)
    has_none = np.array([key.trajectory in unmade for key in sample_keys(batch, trajectories.last)], dtype=bool)
    for place, scores in late.values.items():
        values[:, place] = [np.nan if score is None else score for score in scores]
        values[has_none, place] = np.nan
    changed: dict[str, Any] = {"function_rewards": values[trajectories.index.numpy()].tolist()}
    if set(late.values) >= set(rewards.entries.models):
        keys = sample_keys(batch, trajectories.last)
        of_trajectories, missing = total_rewards(rewards.names, rewards.weights, keys, values, merged)
        merged += missing
        totals = torch.from_numpy(of_trajectories)[trajectories.index]
        changed["rewards"] = totals
        if "token_rewards" in batch:
            tokens = batch["token_rewards"]
            counted = ~totals.isnan()[tokens.row_index()]
            changed["token_rewards"] = tokens.with_values(torch.where(counted, tokens.values, 0.0))
    return batch.without(*changed).with_columns(**changed), merged
