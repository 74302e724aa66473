"""Readable records of samples, for samples.jsonl and the console."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.batch import Batch, SampleKey
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.rollout.successes import ANSWER


def sample_records(
    step: int, batch: Batch, names: Sequence[str], first: tuple[int, int], eval_set: str | None = None
) -> list[dict[str, Any]]:
    """Write down key, prompt, completion and rewards of every sample of a batch. eval_set: the name of the evaluation
    set that they belong to, which is written too; None for samples of training.

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
        if eval_set is not None:
            record = {"step": step, "set": eval_set} | record
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


def shown_completions(batch: Batch) -> list[str]:
    """Return the completion of each sample for readers: a conversation with its roles, a single completion as it is."""
    if "conversation" not in batch:
        return list(batch["completion"])
    return [_conversation_text(shown) for shown in batch["conversation"]]


def _conversation_text(shown: Mapping[str, Any]) -> str:
    """Write down a conversation: its messages with their roles, or, if it has none, its tokens with who made them."""
    if messages := shown.get("messages"):
        return "\n".join(_message_text(message) for message in messages)
    if len(shown["tokens"]) == 1:
        return str(shown["tokens"][0]["text"])
    return "\n".join(f"{span['origin']}: {span['text']}" for span in shown["tokens"])


def _message_text(message: Mapping[str, Any]) -> str:
    """Write down a message: its role, its text, and each tool call as a call of a function."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(block.get("text", "")) for block in content)
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    made = [f"{call.get('name')}({_arguments_text(call.get('arguments'))})" for call in calls]
    return f"{message['role']}: " + " -> ".join(part for part in (content.strip(), *made) if part)


def _arguments_text(arguments: Any) -> str:
    if not isinstance(arguments, Mapping):
        return str(arguments or "")
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
