"""Readable records of samples, for samples.jsonl and the console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hybrid_rl.batch import Batch
from hybrid_rl.batch.trajectories import sample_keys


def sample_records(step: int, batch: Batch, names: Sequence[str], first: tuple[int, int]) -> list[dict[str, Any]]:
    """Write down key, prompt, completion and rewards of every sample of a batch.

    names: of the reward functions. first: the smallest group and trajectory of the step, over all ranks. Records count
    from there, so that a resumed run writes the same ones, whatever it generated besides.
    """
    first_group, first_trajectory = first
    columns = sorted({column for extra in batch["extra"] for column in extra})
    records = []
    groups = batch["group"].tolist()
    for index, (trajectory, turn) in enumerate(sample_keys(batch)):
        values = [None if math.isnan(value) else value for value in batch["function_rewards"][index]]
        reward = float(batch["rewards"][index])
        record = {
            "step": step,
            "group": groups[index] - first_group,
            "trajectory": trajectory - first_trajectory,
            "turn": turn,
            "prompt": batch["prompt"][index],
            "completion": batch["completion"][index],
            "reward": None if math.isnan(reward) else reward,
            "rewards": dict(zip(names, values, strict=True)),
            "finish_reason": batch["finish_reason"][index],
        }
        if columns:
            record["extra"] = {column: batch["extra"][index].get(column) for column in columns}
        records.append(record)
    return records
