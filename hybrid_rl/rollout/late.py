"""Scores that come when all samples are there, of judges and reward models, and how they join the other rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.metrics import MetricSums
from hybrid_rl.rewards import RewardFailure, RewardRunner
from hybrid_rl.rewards.results import total_rewards


@dataclass(frozen=True)
class LateScores:
    """values: place in reward_funcs -> a score per sample of the batch, None where there is none. failures: of samples
    that could not be scored, by their places in the whole rollout, as everywhere. logged: numbers for the log."""

    values: Mapping[int, Sequence[float | None]]
    failures: Sequence[RewardFailure] = ()
    logged: MetricSums = field(default_factory=MetricSums)


def merge_late(
    batch: Batch, failures: Sequence[RewardFailure], rewards: RewardRunner, first_id: int, late: LateScores
) -> tuple[Batch, list[RewardFailure]]:
    """The batch with these scores in function_rewards and, once no place is missing, in rewards; and all failures.

    failures: those of the batch so far. first_id: as of the RolloutCall. A sample that anything failed on has no
    reward, and no token rewards. With judges and reward models both, the reward models' scores come last.
    """
    merged = [*failures, *late.failures]
    values = np.array(batch["function_rewards"], dtype=np.float64).reshape(batch.num_samples, len(rewards.names))
    for place, scores in late.values.items():
        values[:, place] = [np.nan if score is None else score for score in scores]
    changed: dict[str, Any] = {"function_rewards": values.tolist()}
    if set(late.values) >= set(rewards.entries.models):
        keys = (batch["trajectory"] - first_id).tolist()
        totals, missing = total_rewards(rewards.names, rewards.weights, keys, values, merged)
        merged += missing
        changed["rewards"] = torch.from_numpy(totals)
        if "token_rewards" in batch:
            tokens = batch["token_rewards"]
            counted = ~torch.from_numpy(np.isnan(totals))[tokens.row_index()]
            changed["token_rewards"] = tokens.with_values(torch.where(counted, tokens.values, 0.0))
    return batch.without(*changed).with_columns(**changed), merged
