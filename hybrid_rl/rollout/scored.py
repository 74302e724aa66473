"""A worker's share of a rollout: prompts become requests, requests samples, samples rewards, all of it a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.data import PromptRow
from hybrid_rl.interrupts import interrupt_requested
from hybrid_rl.metrics import MetricSums, Timings
from hybrid_rl.rewards import RewardFailure, RewardInput, RewardResult, RewardRunner, TrainerState
from hybrid_rl.rollout.base import FinishedSample, RolloutRequest, SamplingParams, derive_seed
from hybrid_rl.rollout.client import RolloutClient

POLL_SECONDS = 0.1  # how soon an interrupt is seen while rewards are awaited


@dataclass(frozen=True)
class RolloutTask:
    """One prompt of a rollout, num_generations samples. place: of the prompt among all of the rollout, over all
    ranks."""

    place: int
    row: PromptRow


@dataclass(frozen=True)
class RolloutCall:
    """What all prompts of a rollout have in common.

    first_id: of the samples' ids, which no other rollout of the run uses. purpose: with the seed, a sample's place and
    nothing else it decides the sample's noise: where it is made, and beside which others, does not matter. is_scored:
    whether rewards are wanted.
    """

    num_generations: int
    params: SamplingParams
    version: int
    state: TrainerState
    purpose: str
    first_id: int
    is_scored: bool = True


@dataclass
class RolloutReport:
    """What a worker's share of a rollout cost and showed, beside its batch. logged: numbers of log_metric."""

    seconds: dict[str, float]
    failures: list[RewardFailure]
    logged: MetricSums


class ScoredRollout:
    """Makes scored samples, which are scored as they finish. decode: token ids to text without special tokens; seed: of
    every sample's noise."""

    def __init__(
        self, client: RolloutClient, rewards: RewardRunner | None, decode: Callable[[Sequence[int]], str], *, seed: int
    ) -> None:
        self._client = client
        self._rewards = rewards
        self._decode = decode
        self._seed = seed

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """The samples of these prompts, prompt by prompt. Raises KeyboardInterrupt where an interrupt was requested."""
        timings = Timings()
        requests = [request for task in tasks for request in self._requests(task, call)]
        tasks_of = {r.id: task for r, task in zip(requests, _repeat(tasks, call.num_generations), strict=True)}
        rewards = self._rewards if call.is_scored else None
        finished: dict[int, FinishedSample] = {}
        texts: dict[int, str] = {}
        futures: list[Future[RewardResult]] = []
        with timings.measure("rollout"):
            for events in self._client.stream(requests, call.version):
                finished.update((event.id, event) for event in events)
                texts.update((event.id, self._decode(event.completion_ids)) for event in events)
                if rewards is not None:
                    inputs = [_reward_input(e, tasks_of[e.id].row, texts[e.id], call.first_id) for e in events]
                    futures.append(rewards.submit(inputs, call.state))
        samples = [finished[request.id] for request in requests]
        columns = _sample_columns(_repeat(tasks, call.num_generations), samples, call)
        columns["completion"] = [texts[request.id] for request in requests]
        with timings.measure("reward"):
            results = _results(futures)
        if rewards is not None:
            columns.update(_reward_columns(results, [r.id - call.first_id for r in requests], len(rewards.names)))
        return Batch(columns), RolloutReport(timings.seconds, _failures(results), _logged(results))

    def _requests(self, task: RolloutTask, call: RolloutCall) -> list[RolloutRequest]:
        requests = []
        for generation in range(call.num_generations):
            seed = derive_seed(self._seed, call.params.seed, call.purpose, task.place, generation)
            identity = call.first_id + task.place * call.num_generations + generation
            params = replace(call.params, seed=seed)
            requests.append(
                RolloutRequest(identity, tuple(task.row.prompt_ids), params, group=call.first_id + task.place)
            )
        return requests


def _repeat(tasks: Sequence[RolloutTask], num_generations: int) -> list[RolloutTask]:
    return [task for task in tasks for _ in range(num_generations)]


def _reward_input(sample: FinishedSample, row: PromptRow, text: str, first_id: int) -> RewardInput:
    return RewardInput(sample.id - first_id, row.prompt, text, sample.completion_ids, row.columns)


def _results(futures: Sequence[Future[RewardResult]]) -> list[RewardResult]:
    """The results, in order. A reward may take long: an interrupt is seen meanwhile."""
    waiting = set(futures)
    while waiting:
        if interrupt_requested():
            raise KeyboardInterrupt
        _, waiting = wait(waiting, timeout=POLL_SECONDS)
    return [future.result() for future in futures]


def _sample_columns(
    tasks: Sequence[RolloutTask], samples: Sequence[FinishedSample], call: RolloutCall
) -> dict[str, Any]:
    completions = Jagged.from_rows([sample.completion_ids for sample in samples], torch.int64)
    prompts = Jagged.from_rows([list(task.row.prompt_ids) for task in tasks], torch.int64)

    def aligned(name: str, dtype: torch.dtype) -> Jagged:
        return completions.with_values(
            torch.tensor([value for s in samples for value in getattr(s, name)], dtype=dtype)
        )

    return {
        "prompt_ids": prompts,
        "completion_ids": completions,
        "completion_mask": completions.with_values(torch.ones_like(completions.values, dtype=torch.bool)),
        "rollout_logprobs": aligned("logprobs", torch.float32),
        "policy_version": aligned("versions", torch.int64),
        "oldest_version": torch.tensor([min(s.versions, default=-1) for s in samples], dtype=torch.int64),
        "prompt_length": prompts.lengths,
        "completion_length": completions.lengths,
        "group": torch.tensor([call.first_id + task.place for task in tasks], dtype=torch.int64),
        "trajectory": torch.tensor([sample.id for sample in samples], dtype=torch.int64),
        "turn": torch.zeros(len(samples), dtype=torch.int64),
        "finish_reason": [sample.finish_reason for sample in samples],
        "prompt": [task.row.prompt for task in tasks],
        "row": [dict(task.row.columns) for task in tasks],
    }


def _reward_columns(results: Sequence[RewardResult], keys: Sequence[int], num_functions: int) -> dict[str, Any]:
    place = {key: index for index, key in enumerate(keys)}
    rewards = torch.full((len(keys),), math.nan, dtype=torch.float64)
    values = np.full((len(keys), num_functions), np.nan)
    extras: list[dict[str, Any]] = [{} for _ in keys]
    for result in results:
        where = [place[key] for key in result.keys]
        rewards[where] = torch.from_numpy(result.rewards)
        values[where] = result.values
        for column, by_key in result.extras.items():
            for key, value in by_key.items():
                extras[place[key]][column] = value
    return {"rewards": rewards, "function_rewards": values.tolist(), "extra": extras}


def _failures(results: Sequence[RewardResult]) -> list[RewardFailure]:
    """All failures; the details of the first of each kind, which is what is shown."""
    seen: set[tuple[str, str]] = set()
    failures = []
    for failure in (failure for result in results for failure in result.failures):
        kind = (failure.function, failure.reason)
        failures.append(replace(failure, detail="") if kind in seen else failure)
        seen.add(kind)
    return failures


def _logged(results: Sequence[RewardResult]) -> MetricSums:
    logged = MetricSums()
    for result in results:
        for name, numbers in result.metrics.items():
            logged.mean(name, sum(n * count for n, count in numbers), sum(count for _, count in numbers))
    return logged
