"""The collector: everything before learning. Prompts become requests, requests samples, samples rewards, all a
batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.data import PromptRow, PromptSampler
from hybrid_rl.errors import DataError
from hybrid_rl.metrics import MetricSums, Timings, mean_and_std
from hybrid_rl.rewards import (
    RewardInput,
    RewardResult,
    RewardRunner,
    TrainerState,
    check_failure_share,
    format_failures,
)
from hybrid_rl.rollout.base import FinishedSample, RolloutRequest, SamplingParams, derive_seed
from hybrid_rl.rollout.client import RolloutClient

logger = logging.getLogger("hybrid_rl")


@dataclass(frozen=True)
class Generation:
    """One generated completion. logprobs: ln p of each token under the distribution that it was sampled from."""

    prompt: Any
    completion: str
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: str


def generations_of(batch: Batch) -> list[Generation]:
    """The samples of a batch one by one, in order."""
    columns = ("prompt", "completion", "completion_ids", "rollout_logprobs", "finish_reason")
    return [
        Generation(prompt, text, ids.tolist(), logprobs.tolist(), reason)
        for prompt, text, ids, logprobs, reason in zip(*(batch[name] for name in columns), strict=True)
    ]


@dataclass
class Collected:
    """A batch with what its collection cost and showed. extras: log_extra columns of the reward functions, by
    sample."""

    batch: Batch
    timings: Timings
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


class Collector:
    """Collects scored samples. decode: token ids to text without special tokens; seed: of every sample's noise."""

    def __init__(
        self,
        client: RolloutClient,
        rewards: RewardRunner | None,
        decode: Callable[[Sequence[int]], str],
        *,
        seed: int,
        max_failure_share: float,
    ) -> None:
        self._client = client
        self._rewards = rewards
        self._decode = decode
        self._seed = seed
        self._max_failure_share = max_failure_share
        self._next_id = 0

    def collect(
        self,
        sampler: PromptSampler,
        num_prompts: int,
        num_generations: int,
        params: SamplingParams,
        version: int,
        state: TrainerState,
    ) -> Collected:
        """The batch of a training step: the sampler's next prompts, num_generations samples each.

        The noise of a sample depends on the seed, the step and its place in the batch alone.
        """
        rows = sampler.take(num_prompts)
        if len(rows) < num_prompts:
            raise DataError(f"the training data gave {len(rows)} of {num_prompts} prompts: it has ended or is empty")
        return self.rollout(rows, num_generations, params, version, state, purpose=f"train/{state.global_step}")

    def rollout(
        self,
        rows: Sequence[PromptRow],
        num_generations: int,
        params: SamplingParams,
        version: int,
        state: TrainerState,
        *,
        purpose: str,
    ) -> Collected:
        """Samples for these prompts, group by group, scored while others are still being generated."""
        timings = Timings()
        requests = self._requests(rows, num_generations, params, purpose)
        first = requests[0].id
        finished: dict[int, FinishedSample] = {}
        texts: dict[int, str] = {}
        futures: list[Future[RewardResult]] = []
        with timings.measure("rollout"):
            for events in self._client.stream(requests, version):
                keys = [event.id - first for event in events]
                finished.update(zip(keys, events, strict=True))
                texts.update((key, self._decode(finished[key].completion_ids)) for key in keys)
                if self._rewards is not None:
                    inputs = [
                        _reward_input(key, rows[key // num_generations], finished[key], texts[key]) for key in keys
                    ]
                    futures.append(self._rewards.submit(inputs, state))
        samples = [finished[key] for key in range(len(requests))]
        columns = _sample_columns(rows, samples, num_generations, first_group=first)
        columns["completion"] = [texts[key] for key in range(len(requests))]
        metrics = _length_metrics(samples)
        extras: dict[str, dict[int, Any]] = {}
        logged: dict[str, float] = {}
        if self._rewards is not None:
            with timings.measure("reward"):
                results = [future.result() for future in futures]
            columns.update(self._reward_columns(results, len(samples), state, purpose))
            of_rewards, logged = self._reward_metrics(results, columns["rewards"], num_generations)
            metrics.update(of_rewards)
            for result in results:
                for column, by_key in result.extras.items():
                    extras.setdefault(column, {}).update(by_key)
        return Collected(Batch(columns), timings, metrics, extras, logged)

    def _requests(
        self, rows: Sequence[PromptRow], num_generations: int, params: SamplingParams, purpose: str
    ) -> list[RolloutRequest]:
        first = self._next_id
        self._next_id += len(rows) * num_generations
        requests = []
        for group, row in enumerate(rows):
            for generation in range(num_generations):
                own = SamplingParams(
                    **{**vars(params), "seed": derive_seed(self._seed, params.seed, purpose, group, generation)}
                )
                identity = first + group * num_generations + generation
                requests.append(RolloutRequest(identity, tuple(row.prompt_ids), own, group=first + group))
        return requests

    def _reward_columns(
        self, results: list[RewardResult], num_samples: int, state: TrainerState, purpose: str
    ) -> dict[str, Any]:
        check_failure_share(results, num_samples, self._max_failure_share, state.global_step)
        failures = [failure for result in results for failure in result.failures]
        if failures:
            logger.warning(
                "%s: %d samples have no reward and are masked\n%s",
                purpose,
                len({f.key for f in failures}),
                format_failures(failures),
            )
        rewards = torch.full((num_samples,), math.nan, dtype=torch.float64)
        values = np.full((num_samples, results[0].values.shape[1] if results else 0), np.nan)
        for result in results:
            rewards[result.keys] = torch.from_numpy(result.rewards)
            values[result.keys] = result.values
        return {"rewards": rewards, "function_rewards": values.tolist()}

    def _reward_metrics(
        self, results: list[RewardResult], rewards: torch.Tensor, num_generations: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Our metrics of the rewards, and the means of what the functions logged."""
        assert self._rewards is not None
        metrics: dict[str, float] = {}
        values = np.concatenate([result.values for result in results])
        for index, name in enumerate(self._rewards.names):
            metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = mean_and_std(
                torch.from_numpy(values[:, index])
            )
        metrics["reward"], metrics["reward_std"] = mean_and_std(rewards)
        groups = rewards.view(-1, num_generations)
        low = groups.nan_to_num(math.inf).amin(1)
        high = groups.nan_to_num(-math.inf).amax(1)
        metrics["frac_reward_zero_std"] = float((high <= low).double().mean())
        metrics["rewards/num_failed"] = float(rewards.isnan().sum())
        logged = MetricSums()
        for result in results:
            for name, numbers in result.metrics.items():
                logged.mean(name, sum(n * count for n, count in numbers), sum(count for _, count in numbers))
        return metrics, logged.result()


def _reward_input(key: int, row: PromptRow, sample: FinishedSample, text: str) -> RewardInput:
    return RewardInput(key, row.prompt, text, sample.completion_ids, row.columns)


def _sample_columns(
    rows: Sequence[PromptRow], samples: list[FinishedSample], num_generations: int, *, first_group: int
) -> dict[str, Any]:
    completions = Jagged.from_rows([sample.completion_ids for sample in samples], torch.int64)
    per_sample = [row for row in rows for _ in range(num_generations)]

    def aligned(name: str, dtype: torch.dtype) -> Jagged:
        return completions.with_values(
            torch.tensor([value for s in samples for value in getattr(s, name)], dtype=dtype)
        )

    return {
        "prompt_ids": Jagged.from_rows([list(row.prompt_ids) for row in per_sample], torch.int64),
        "completion_ids": completions,
        "completion_mask": completions.with_values(torch.ones_like(completions.values, dtype=torch.bool)),
        "rollout_logprobs": aligned("logprobs", torch.float32),
        "policy_version": aligned("versions", torch.int64),
        "group": torch.arange(len(samples)) // num_generations + first_group,
        "trajectory": torch.arange(len(samples)) + first_group,
        "turn": torch.zeros(len(samples), dtype=torch.int64),
        "finish_reason": [sample.finish_reason for sample in samples],
        "prompt": [row.prompt for row in per_sample],
        "row": [dict(row.columns) for row in per_sample],
    }


def _length_metrics(samples: list[FinishedSample]) -> dict[str, float]:
    lengths = torch.tensor([len(sample.completion_ids) for sample in samples], dtype=torch.float64)
    ended = torch.tensor([sample.finish_reason == "stop" for sample in samples])
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float((~ended).double().mean()),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
    return metrics
