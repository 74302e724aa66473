"""What is known of each token of a few samples a step, for the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Batch, SampleKey
from hybrid_rl.batch.texts import token_texts
from hybrid_rl.batch.trajectories import sample_keys
from hybrid_rl.training.said import FirstWords

NUM_SHOWN = 4  # samples a step, over all ranks; each rank shows at least one
MAX_TOKENS = 2048  # of a sample, from its first
DIGITS = 5
# Columns of a batch that are shown as they are, by name in the record.
COLUMNS = {"advantage": "advantages", "ref_logprob": "ref_logprobs", "value": "values", "reward": "token_rewards"}


def token_records(
    batch: Batch, tokenizer: PreTrainedTokenizerBase, said: FirstWords | None, number: int
) -> dict[SampleKey, dict[str, Any]]:
    """Return lists with one entry per token for some samples of a batch, at most `number`, and one at least.

    text: of each token; joined, they are the completion with its special tokens. logprob: the engine's;
    trainer_logprob: the trainer's before the update; entropy: in nats, where the token was chosen; advantage;
    ref_logprob, value and reward if the algorithm has them. policy: 1 for tokens that the policy made, 0 for those of
    tools and environments; left out if it made all. Numbers that are not finite are null. num_tokens: of the whole
    sample, if only its first MAX_TOKENS are there.

    said: what the trainer said before the update, None if there was none; it lacks samples of later mini-batches, whose
    trainer_logprob is there if the algorithm computes it anyway, and whose entropy is not.
    """
    keys, records = sample_keys(batch), {}
    for index in chosen(batch, max(number, 1)):
        key = keys[index]
        ids = batch["completion_ids"][index][:MAX_TOKENS].tolist()
        mask = batch["completion_mask"][index][:MAX_TOKENS]
        values: dict[str, Any] = {"text": token_texts(tokenizer, ids)}
        values["logprob"] = _numbers(batch["rollout_logprobs"][index], mask)
        first = None if said is None else said.about(key)
        if first is not None:
            values |= {"trainer_logprob": _numbers(first[0], mask), "entropy": _numbers(first[1], mask)}
        elif "old_logprobs" in batch:
            values["trainer_logprob"] = _numbers(batch["old_logprobs"][index], mask)
        values |= {name: _numbers(batch[at][index], mask) for name, at in COLUMNS.items() if at in batch}
        if not bool(mask.all()):
            values["policy"] = mask.int().tolist()
        if (num_tokens := len(batch["completion_ids"][index])) > MAX_TOKENS:
            values["num_tokens"] = num_tokens
        records[key] = values
    return records


def chosen(batch: Batch, number: int) -> list[int]:
    """Choose samples to show: spread evenly over those that teach something, filled up with others."""
    if not batch.num_samples:
        return []
    everything = list(range(batch.num_samples))
    teaches = everything
    if "advantages" in batch:
        teaches = [index for index, row in enumerate(batch["advantages"]) if bool(row.any())]
    spread = _spread(teaches, number)
    others = [index for index in everything if index not in set(teaches)]
    return sorted([*spread, *_spread(others, number - len(spread))])


def _spread(indices: Sequence[int], number: int) -> list[int]:
    """Return at most `number` of the indices, evenly spread, from the first."""
    number = min(number, len(indices))
    return [indices[place * len(indices) // number] for place in range(number)]


def _numbers(column: Tensor, mask: Tensor) -> list[float | None]:
    """Return the first values of a column as JSON numbers; None for tokens that the policy did not make."""
    values = column[: len(mask)].tolist()
    kept = zip(values, mask.tolist(), strict=True)
    return [float(f"{value:.{DIGITS}g}") if on and math.isfinite(value) else None for value, on in kept]
