"""Readable records of samples, for samples.jsonl and the console."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.batch import Batch, SampleKey
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.data.prompts import Messages
from hybrid_rl.rollout.successes import ANSWER

MAX_COLUMN = 2000  # characters of a column of the dataset in a record


def sample_records(
    step: int,
    batch: Batch,
    names: Sequence[str],
    first: tuple[int, int],
    token_values: Mapping[SampleKey, Mapping[str, Any]] | None = None,
    eval_set: str | None = None,
) -> list[dict[str, Any]]:
    """Write down key, prompt, completion and rewards of every sample of a batch. eval_set: the name of the evaluation
    set that they belong to, which is written too; None for samples of training.

    names: of the reward functions. first: the smallest group and trajectory of the step, over all ranks. Records count
    from there, so that a resumed run writes the same ones, whatever it generated besides. Samples of agents have also
    `messages`, the conversation after the prompt; `tokens`, who made which tokens of the completion, with the reward of
    each turn; and, with the last sample of a trajectory, `error`, if one ended it. `row` has the other columns of the
    dataset, such as the answer, each up to MAX_COLUMN characters; `advantage` is the mean over the policy's tokens.
    token_values: of a few samples, what is known of each token (`workers.token_records`).
    """
    first_group, first_trajectory = first
    columns = sorted({column for extra in batch["extra"] for column in extra})
    records = []
    advantages = mean_advantages(batch) if "advantages" in batch else None
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
        if eval_set is not None:
            record = {"step": step, "set": eval_set} | record
        if "row" in batch and (row := batch["row"][index]):
            record["row"] = {str(name): _bounded(value) for name, value in row.items()}
        if advantages is not None:
            record["advantage"] = advantages[index]
        if token_values and (values_of := token_values.get(SampleKey(trajectory, turn))):
            record["token_values"] = dict(values_of)
        if columns:
            record["extra"] = {column: batch["extra"][index].get(column) for column in columns}
        records.append(record)
    return records


def extracted_answers(batch: Batch) -> list[tuple[SampleKey, str | None]]:
    """Return what a reward function read in each sample and left in `log_extra("extracted_answer", ...)`, as text; of
    samples for which it left nothing, nothing."""
    return [
        (key, None if extra[ANSWER] is None else str(extra[ANSWER]))
        for key, extra in zip(sample_keys(batch), batch["extra"], strict=True)
        if ANSWER in extra
    ]


def mean_advantages(batch: Batch) -> list[float | None]:
    """Return the mean advantage of each sample over the tokens that the policy made; None without such a token."""
    rows = zip(batch["advantages"], batch["completion_mask"], strict=True)
    means = [float(values[mask].double().mean()) if bool(mask.any()) else math.nan for values, mask in rows]
    return [mean if math.isfinite(mean) else None for mean in means]


def _bounded(value: Any) -> Any:
    """Return a value of the dataset's for a record: as it is if JSON can hold it and it is short, else as text."""
    if isinstance(value, str):
        return value if len(value) <= MAX_COLUMN else f"{value[:MAX_COLUMN]}... ({len(value):,} characters)"
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        text = str(value)
    return value if len(text) <= MAX_COLUMN and _is_json(value) else _bounded(text)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def shown_completions(batch: Batch) -> list[str | Messages]:
    """Return the completion of each sample for judges: the messages of a conversation, else text: a single completion
    as it is, and one with tokens of others with who made them."""
    if "conversation" not in batch:
        return list(batch["completion"])
    return [shown.get("messages") or _spans_text(shown) for shown in batch["conversation"]]


def _spans_text(shown: Mapping[str, Any]) -> str:
    if len(shown["tokens"]) == 1:
        return str(shown["tokens"][0]["text"])
    return "\n".join(f"{span['origin']}: {span['text']}" for span in shown["tokens"])
