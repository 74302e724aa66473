"""The collector: everything before learning, as the driver sees it. Prompts go to the workers, [N]-sized columns come
back."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybrid_rl.batch import Batch, BatchRef
from hybrid_rl.batch.files import load_rollout
from hybrid_rl.controller import WorkerGroup
from hybrid_rl.data import PromptRow, PromptSampler
from hybrid_rl.errors import DataError
from hybrid_rl.metrics import MetricSums, Timings, mean_and_std
from hybrid_rl.rewards import RewardFailure, TrainerState, check_failure_share, format_failures
from hybrid_rl.rollout.base import SamplingParams
from hybrid_rl.rollout.scored import RolloutCall, RolloutReport, RolloutTask

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
    """A batch with what its collection cost and showed. timings: of the slowest rank; logged: means of what reward
    functions gave to log_metric."""

    batch: Batch | BatchRef
    timings: Timings
    metrics: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


class Collector:
    """Collects scored samples from a worker group. reward_names: of the reward functions."""

    def __init__(self, workers: WorkerGroup, reward_names: Sequence[str], *, max_failure_share: float) -> None:
        self._workers = workers
        self._names = tuple(reward_names)
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
        is_scored: bool = True,
    ) -> Collected:
        """Samples for these prompts, group by group, scored while others are still being generated."""
        call = RolloutCall(num_generations, params, version, state, purpose, self._next_id, is_scored)
        self._next_id += len(rows) * num_generations
        tasks = [RolloutTask(place, row) for place, row in enumerate(rows)]
        batch, reports = self._workers.rollout(tasks, call)
        batch = _in_order(batch)
        timings = Timings()
        for name in ("rollout", "reward"):
            timings.add(name, max(report.seconds.get(name, 0.0) for report in reports))
        metrics = length_metrics(batch)
        logged = MetricSums()
        if is_scored:
            self._check_failures(batch, reports, call)
            metrics.update(reward_metrics(batch, self._names))
            for report in reports:
                logged.merge(report.logged)
        return Collected(batch, timings, metrics, logged.result())

    def _check_failures(self, batch: Batch | BatchRef, reports: Sequence[RolloutReport], call: RolloutCall) -> None:
        failures: list[RewardFailure] = [failure for report in reports for failure in report.failures]
        num_failed = int(batch["rewards"].isnan().sum())
        check_failure_share(num_failed, batch.num_samples, failures, self._max_failure_share, call.state.global_step)
        if failures:
            logger.warning(
                "%s: %d samples have no reward and are masked\n%s", call.purpose, num_failed, format_failures(failures)
            )


def replay(
    folder: Path, step: int, num_prompts: int, num_generations: int, names: Sequence[str], version: int
) -> Collected:
    """The saved rollout of a training step in the place of a new one, as if the policy of this version had made it.
    names: of the reward functions.

    Raises DataError where there is none, or one of another number of prompts, samples or reward functions.
    """
    timings = Timings()
    with timings.measure("rollout"):
        saved = load_rollout(folder, step)
    found = len(saved.group_rows())
    if found != num_prompts:
        raise DataError(
            f"{folder}: the rollout of step {step} has {found} prompts, but prompts_per_step={num_prompts}; set it to "
            f"{found}"
        )
    sizes = sorted({len(rows) for rows in saved.group_rows()})
    if sizes != [num_generations]:
        raise DataError(
            f"{folder}: the rollout of step {step} has {sizes} samples per prompt, but "
            f"num_generations={num_generations}; set it as it was when the rollout was made"
        )
    num_functions = len(saved["function_rewards"][0])
    if num_functions != len(names):
        raise DataError(
            f"{folder}: the rollout of step {step} was scored by {num_functions} reward functions, but {len(names)} "
            f"are given ({', '.join(names)}); give those that scored it"
        )
    batch = saved.without("oldest_version").with_columns(oldest_version=torch.full((saved.num_samples,), version))
    return Collected(batch, timings, length_metrics(batch) | reward_metrics(batch, names))


def reward_metrics(batch: Batch | BatchRef, names: Sequence[str]) -> dict[str, float]:
    """Metrics of the rewards of a batch of whole groups. names: of the reward functions."""
    metrics: dict[str, float] = {}
    values = torch.tensor(batch["function_rewards"], dtype=torch.float64).view(batch.num_samples, len(names))
    for name, column in zip(names, values.T, strict=True):
        metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = mean_and_std(column)
    rewards = batch["rewards"]
    metrics["reward"], metrics["reward_std"] = mean_and_std(rewards)
    _, group = batch["group"].unique(return_inverse=True)
    unset = torch.full((int(group.max()) + 1,), math.inf, dtype=torch.float64)
    low = unset.scatter_reduce(0, group, rewards.nan_to_num(math.inf), "amin")
    high = (-unset).scatter_reduce(0, group, rewards.nan_to_num(-math.inf), "amax")
    metrics["frac_reward_zero_std"] = float((high <= low).double().mean())
    metrics["rewards/num_failed"] = float(rewards.isnan().sum())
    return metrics


def _in_order(batch: Batch | BatchRef) -> Batch | BatchRef:
    """Samples by trajectory: prompt by prompt, whichever rank made them."""
    order = batch["trajectory"].argsort()
    return batch if torch.equal(order, torch.arange(batch.num_samples)) else batch.select(order)


def length_metrics(batch: Batch | BatchRef) -> dict[str, float]:
    """Metrics of the completions' lengths and ends."""
    lengths = batch["completion_length"].double()
    ended = torch.tensor([reason == "stop" for reason in batch["finish_reason"]])
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float((~ended).double().mean()),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
    return metrics
