"""Finished samples as columns and as the inputs of reward functions; rewards as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hybrid_rl.batch import Batch, Jagged, SampleKey, lengths_to_offsets
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import FinishedSample
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.rewards import RewardFailure, RewardInput, RewardResult
from hybrid_rl.rewards.completions import TAIL_TOKENS, opening_of

# A submission wakes threads that take the interpreter from the engine; so finished samples wait until they are one in
# so many of the rollout, or its last.
MAX_SUBMISSIONS = 8


def reward_input(
    sample: FinishedSample, row: PromptRow, text: str, group: int, decode: Callable[[Sequence[int]], str]
) -> RewardInput:
    """Return what reward functions are given of a sample. text: of its completion; decode: as it was decoded."""
    opening = opening_of(row.prompt, decode(row.prompt_ids[-TAIL_TOKENS:]))
    return RewardInput(
        SampleKey(sample.id), row.prompt, text, sample.completion_ids, row.columns, group=group, opening=opening
    )


def columns_of(
    rows: Sequence[PromptRow],
    groups: Sequence[int],
    samples: Sequence[FinishedSample],
    temperature: float,
    experts_shape: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Make the columns of finished samples, each with its prompt and the id of its group. experts_shape: that of the
    engine, which decides whether there is a column of experts, on every rank alike."""
    completions = Jagged.from_rows([sample.completion_ids for sample in samples], torch.int64)
    prompts = Jagged.from_rows([list(row.prompt_ids) for row in rows], torch.int64)
    keys = torch.tensor([SampleKey(sample.id) for sample in samples], dtype=torch.int64).view(-1, 2)

    def aligned(name: str, dtype: torch.dtype) -> Jagged:
        return completions.with_values(
            torch.tensor([value for s in samples for value in getattr(s, name)], dtype=dtype)
        )

    num_tokens = prompts.lengths + completions.lengths
    return ({} if experts_shape is None else _expert_column(samples, num_tokens, experts_shape)) | {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "completion_mask": completions.with_values(torch.ones_like(completions.values, dtype=torch.bool)),
        "rollout_logprobs": aligned("logprobs", torch.float32),
        "policy_version": aligned("versions", torch.int64),
        "oldest_version": torch.tensor([min(s.versions, default=-1) for s in samples], dtype=torch.int64),
        "prompt_length": prompts.lengths,
        "completion_length": completions.lengths,
        "temperature": torch.full((len(samples),), temperature, dtype=torch.float64),
        "group": torch.tensor(groups, dtype=torch.int64),
        "trajectory": keys[:, 0],
        "turn": keys[:, 1],
        "finish_reason": [sample.finish_reason for sample in samples],
        "prompt": [row.prompt for row in rows],
        "row": [dict(row.columns) for row in rows],
    }


def _expert_column(
    samples: Sequence[FinishedSample], num_tokens: torch.Tensor, shape: tuple[int, int]
) -> dict[str, Jagged]:
    """Make the column of the experts that were recorded."""
    offsets = lengths_to_offsets(num_tokens)
    values = torch.full((int(offsets[-1]), *shape), -1, dtype=torch.int16)
    for sample, start in zip(samples, offsets.tolist(), strict=False):
        if sample.routed_experts is not None:
            values[start : start + len(sample.routed_experts)] = torch.from_numpy(sample.routed_experts)
    return {"routed_experts": Jagged(values, offsets)}


def unrecorded_share(batch: Batch) -> MetricSums:
    """Return which share of the tokens of a batch has no record of its experts, without the last token of each sample,
    which is not computed; nothing of a batch without records."""
    sums = MetricSums()
    if "routed_experts" in batch and batch.num_samples:
        experts = batch["routed_experts"]
        is_missing = (experts.values < 0).flatten(1).any(1)
        is_missing[experts.offsets[1:] - 1] = False
        sums.mean("routing/unrecorded_share", int(is_missing.sum()), len(is_missing) - len(experts))
    return sums


def reward_columns(result: RewardResult, *, is_dense: bool) -> dict[str, Any]:
    """Make the columns of rewards. is_dense: on every rank alike, whatever the samples of this one got."""
    columns: dict[str, Any] = {
        "rewards": torch.from_numpy(result.rewards),
        "function_rewards": result.values.tolist(),
        "extra": [
            {name: by_key[key] for name, by_key in result.extras.items() if key in by_key} for key in result.keys
        ],
    }
    if is_dense:
        tokens = [torch.from_numpy(row) for row in result.token_rewards]
        columns["token_rewards"] = Jagged.from_rows(tokens, torch.float32)
    return columns


def first_in_full(failures: Sequence[RewardFailure]) -> list[RewardFailure]:
    """Keep the details of the first failure of each kind only, which is what is shown."""
    first = {(failure.function, failure.reason): failure for failure in reversed(failures)}
    return [
        failure if failure is first[failure.function, failure.reason] else replace(failure, detail="")
        for failure in failures
    ]


def logged_means(result: RewardResult) -> MetricSums:
    """Return what reward functions gave to log_metric, as means over samples."""
    logged = MetricSums()
    for name, numbers in result.metrics.items():
        logged.mean(name, sum(n * count for n, count in numbers), sum(count for _, count in numbers))
    return logged
