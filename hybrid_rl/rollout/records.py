"""Readable records of samples, for samples.jsonl and the console."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.batch import Batch
from hybrid_rl.batch.messages import message_text
from hybrid_rl.batch.trajectories import sample_keys


def sample_records(step: int, batch: Batch, names: Sequence[str], first: tuple[int, int]) -> list[dict[str, Any]]:
    """Write down key, prompt, completion and rewards of every sample of a batch.

    names: of the reward functions. first: the smallest group and trajectory of the step, over all ranks. Records count
    from there, so that a resumed run writes the same ones, whatever it generated besides. Samples of agents have also
    `messages`, the conversation after the prompt; `tokens`, who made which tokens of the completion, with the reward of
    each turn; and, with the last sample of a trajectory, `error`, if one ended it.
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
        if "conversation" in batch:
            record |= {name: value for name, value in batch["conversation"][index].items() if value is not None}
        if columns:
            record["extra"] = {column: batch["extra"][index].get(column) for column in columns}
        records.append(record)
    return records


def shown_completions(batch: Batch) -> list[str]:
    """Return the completion of each sample for readers: a conversation with its roles, a single completion as it is."""
    if "conversation" not in batch:
        return list(batch["completion"])
    return [_conversation_text(shown) for shown in batch["conversation"]]


def _conversation_text(shown: Mapping[str, Any]) -> str:
    """Write down a conversation: its messages with their roles, or, if it has none, its tokens with who made them."""
    if messages := shown.get("messages"):
        return "\n".join(message_text(message) for message in messages)
    if len(shown["tokens"]) == 1:
        return str(shown["tokens"][0]["text"])
    return "\n".join(f"{span['origin']}: {span['text']}" for span in shown["tokens"])
