"""Lengths of completions: as they are, and predicted from those that the same prompts had before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybrid_rl.batch import TRUNCATIONS, AnyBatch, Trajectories
from hybrid_rl.data.mixture import DATASET_COLUMN
from hybrid_rl.data.prompts import PromptRow


def expected_length(num_tokens: int, known: Sequence[int], limit: int) -> int:
    """Return how long a completion may be expected to get that has num_tokens so far.

    known: lengths that count as examples of it; their mean is expected, without those that it has outgrown. If none is
    left, it is as far from its end as from its beginning, as it is if lengths have a heavy tail; without any example,
    one that has not begun gets all of `limit`, the most that it may have.
    """
    longer = [length for length in known if length > num_tokens]
    expected = rounded_mean(sum(longer), len(longer)) if longer else 2 * num_tokens or limit
    return min(expected, limit)


def rounded_mean(total: int, count: int) -> int:
    """Return total / count as a whole number, halves rounded up."""
    return (2 * total + count) // (2 * count)


def policy_lengths(batch: AnyBatch) -> torch.Tensor:
    """Return the number of tokens that the policy made for each of M trajectories, int64 [M]."""
    trajectories = Trajectories.of(batch)
    made = batch["policy_length" if "policy_length" in batch else "completion_length"].long()
    return torch.zeros(trajectories.num_trajectories, dtype=torch.int64).index_add(0, trajectories.index, made)


def group_lengths(batch: AnyBatch) -> list[int]:
    """Return the mean number of tokens that the policy made for a trajectory, of each group of a batch, in the order of
    the groups' ids."""
    trajectories, lengths = Trajectories.of(batch), policy_lengths(batch)
    ids, group = batch["group"][trajectories.first].unique(return_inverse=True)
    totals = torch.zeros(len(ids), dtype=torch.int64).index_add(0, group, lengths).tolist()
    counts = group.bincount(minlength=len(ids)).tolist()
    return [rounded_mean(total, count) for total, count in zip(totals, counts, strict=True)]


def length_metrics(batch: AnyBatch) -> dict[str, float]:
    """Return metrics of the completions' lengths and ends, every trajectory counted once. Only tokens that the policy
    made count, as in TRL; clipped are those that a limit of tokens, tool calls or time cut off."""
    trajectories, lengths = Trajectories.of(batch), policy_lengths(batch).double()
    reasons = [batch["finish_reason"][sample] for sample in trajectories.last.tolist()]
    ended = torch.tensor([reason == "stop" for reason in reasons], dtype=torch.bool)
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": sum(reason in TRUNCATIONS for reason in reasons) / len(reasons),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
        metrics["completions/min_terminated_length"] = float(lengths[ended].min())
        metrics["completions/max_terminated_length"] = float(lengths[ended].max())
    return metrics


class LengthRecord:
    """How long the completions of each prompt were when it was trained on last.

    What a step finds counts from the next step on, and not at all if the step is taken back.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._found: dict[str, int] = {}  # by the step below
        self._step = 0
        self._typical: int | None = None

    def begin(self, step: int) -> None:
        """Predict for this training step from now on. If it was begun before, it is begun again."""
        if step != self._step:
            self._known |= self._found
        self._found, self._step = {}, step
        self._typical = rounded_mean(sum(self._known.values()), len(self._known)) if self._known else None

    def expected(self, row: PromptRow) -> int | None:
        """Return the number of tokens that a completion of this prompt may be expected to have: as last time, or if
        there was none, as those of all prompts; None before anything is known."""
        return self._known.get(_name(row), self._typical)

    def observe(self, rows: Sequence[PromptRow], lengths: Sequence[int]) -> None:
        """Note the mean length of the completions of each of these prompts, in tokens."""
        self._found.update((_name(row), max(1, length)) for row, length in zip(rows, lengths, strict=True))

    def state_dict(self, step: int) -> dict[str, int]:
        """Return what is known after a training step, as plain JSON values."""
        return self._known | (self._found if self._step <= step else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what was known then."""
        self._known, self._found, self._step = dict(state), {}, 0


def _name(row: PromptRow) -> str:
    """Return what a prompt has in every epoch and no other prompt has; of several datasets each counts from 0."""
    dataset = row.columns.get(DATASET_COLUMN)
    return f"{row.index} {dataset}" if isinstance(dataset, str) else str(row.index)
