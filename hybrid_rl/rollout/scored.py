"""A worker's share of a rollout: prompts become requests, requests become samples, and samples get rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hybrid_rl.batch import Batch, Jagged, SampleKey
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import FinishedSample, RolloutRequest, SlotUse, derive_seed
from hybrid_rl.engines.client import EngineClient
from hybrid_rl.errors import ConfigError
from hybrid_rl.metrics import MetricSums, Timings
from hybrid_rl.process import progress
from hybrid_rl.process.interrupts import interrupt_requested
from hybrid_rl.rewards import RewardFailure, RewardInput, RewardResult, RewardRunner
from hybrid_rl.rewards.completions import TAIL_TOKENS, opening_of
from hybrid_rl.rewards.results import Part
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.judged import Encode, JudgeRound
from hybrid_rl.rollout.late import merge_late

__all__ = ["RolloutCall", "RolloutReport", "RolloutTask", "ScoredRollout"]

# A submission wakes threads that take the interpreter from the engine; so finished samples wait until they are one in
# so many of the rollout, or its last.
MAX_SUBMISSIONS = 8
POLL_SECONDS = 0.1  # how soon an interrupt is seen while rewards are awaited


@dataclass
class RolloutReport:
    """The report of a worker's share of a rollout, which comes with its batch. seconds: by part of the work. logged:
    numbers of log_metric. retried: as in `RewardResult`. metrics: of the samples themselves. use: of the engine while
    it generated them; 0 steps = not counted. num_missing: tokens that may be expected to be generated yet for what the
    worker holds."""

    seconds: dict[str, float]
    failures: list[RewardFailure] = field(default_factory=list)
    logged: MetricSums = field(default_factory=MetricSums)
    retried: dict[str, tuple[int, str]] = field(default_factory=dict)
    metrics: MetricSums = field(default_factory=MetricSums)
    use: SlotUse = SlotUse()
    num_missing: int = 0


class ScoredRollout:
    """Makes scored samples. They are scored while others are generated: whenever an eighth of this rank's samples has
    finished, those that wait get one call; by whole groups if `rewards` score by group. Judges that are the engine
    itself get a separate round in the same session, after all samples.

    decode: token ids to text without special tokens. seed: of every sample's noise. encode: what a judge is asked, text
    or messages, to token ids; max_length: of a question with its answer, None = the engine has no limit. If there
    are reward models, rewards are NaN until `merge_late` adds their scores.
    Raises ConfigError for a judge without `encode`.
    """

    def __init__(
        self,
        client: EngineClient,
        rewards: RewardRunner | None,
        decode: Callable[[Sequence[int]], str],
        *,
        seed: int,
        encode: Encode | None = None,
        max_length: int | None = None,
    ) -> None:
        self._client = client
        self._decode = decode
        self._seed = seed
        self._encode, self._max_length = encode, max_length
        self.score_with(rewards)

    def score_with(self, rewards: RewardRunner | None) -> None:
        """Score with these functions from now on."""
        self._rewards = rewards
        self._judges: JudgeRound | None = None
        if rewards is not None and rewards.entries.judges:
            if self._encode is None:
                raise ConfigError("an EngineJudge needs the policy's tokenizer: pass encode= to ScoredRollout")
            limits: Any = {"seed": self._seed, "max_length": self._max_length}
            self._judges = JudgeRound(self._client, rewards, self._decode, self._encode, **limits)

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return samples of these prompts, prompt by prompt. Raises KeyboardInterrupt if an interrupt was requested."""
        timings = Timings()
        tasks_of = {call.trajectory(task, i): task for task in tasks for i in range(call.num_generations)}
        requests = [request for task in tasks for request in self._requests(task, call)]
        rewards = self._rewards if call.is_scored else None
        finished: dict[int, FinishedSample] = {}
        texts: dict[int, str] = {}
        inputs: dict[int, RewardInput] = {}
        futures: list[Future[list[tuple[int, Part]]]] = []
        unscored: dict[int, list[RewardInput]] = {}  # of groups that are not whole yet
        ready: list[RewardInput] = []
        progress.count(len(requests), "samples")
        self._client.take_use()
        with ExitStack() as stack:
            if rewards is not None and self._judges is not None:
                stack.enter_context(self._client.session())  # the judges' round finds the prefixes of this one
            with timings.measure("rollout"):
                for events in self._client.stream(requests, call.version):
                    finished.update((event.id, event) for event in events)
                    progress.advance(len(events))
                    texts.update((event.id, self._decode(event.completion_ids)) for event in events)
                    if rewards is not None:
                        new = [
                            reward_input(e, tasks_of[e.id].row, texts[e.id], call.group(tasks_of[e.id]), self._decode)
                            for e in events
                        ]
                        inputs.update((event.id, sample) for event, sample in zip(events, new, strict=True))
                        if rewards.score_by == "group":
                            new = whole_groups(unscored, new, call.num_generations)
                        ready += new
                        if ready and (len(ready) * MAX_SUBMISSIONS >= len(requests) or len(finished) == len(requests)):
                            futures.append(rewards.submit(ready, call.state))
                            ready = []
            use = self._client.take_use()
            samples = [finished[request.id] for request in requests]
            columns = sample_columns([tasks_of[sample.id] for sample in samples], samples, call)
            columns["completion"] = [texts[sample.id] for sample in samples]
            scored = [inputs[sample.id] for sample in samples if inputs]
            batch, report = self._rewarded(columns, scored, futures, timings, call)
        return batch, replace(report, use=use)

    def _rewarded(
        self,
        columns: dict[str, Any],
        inputs: Sequence[RewardInput],
        futures: Sequence[Future[list[tuple[int, Part]]]],
        timings: Timings,
        call: RolloutCall,
    ) -> tuple[Batch, RolloutReport]:
        """Return the batch of these columns with its rewards, once they are there. inputs: of the calls `futures`."""
        rewards = self._rewards if call.is_scored else None
        with timings.measure("reward"), progress.doing("rewards"):
            parts = _parts(futures)
        if rewards is None:
            return Batch(columns), RolloutReport(timings.seconds)
        result = rewards.join(inputs, parts)
        batch = Batch({**columns, **reward_columns(result, is_dense=rewards.is_dense)})
        failures = first_in_full(result.failures)
        report = RolloutReport(timings.seconds, failures, logged_means(result), result.retried)
        if self._judges is not None:
            with timings.measure("judge"):
                late = self._judges.run(batch, call, report.failures)
            report.logged.merge(late.logged)
            batch, report.failures = merge_late(batch, report.failures, rewards, late)
        return batch, report

    def close(self) -> None:
        """Nothing is left open between calls."""

    def _requests(self, task: RolloutTask, call: RolloutCall) -> list[RolloutRequest]:
        requests = []
        for generation in range(call.num_generations):
            seed = derive_seed(self._seed, call.params.seed, call.purpose, task.place, generation)
            params = replace(call.params, seed=seed)
            trajectory = call.trajectory(task, generation)
            requests.append(RolloutRequest(trajectory, tuple(task.row.prompt_ids), params, group=call.group(task)))
        return requests


def reward_input(
    sample: FinishedSample, row: PromptRow, text: str, group: int, decode: Callable[[Sequence[int]], str]
) -> RewardInput:
    """Return what reward functions are given of a sample. text: of its completion; decode: as it was decoded."""
    opening = opening_of(row.prompt, decode(row.prompt_ids[-TAIL_TOKENS:]))
    return RewardInput(
        SampleKey(sample.id), row.prompt, text, sample.completion_ids, row.columns, group=group, opening=opening
    )


def whole_groups(
    unscored: dict[int, list[RewardInput]], finished: Sequence[RewardInput], num_generations: int
) -> list[RewardInput]:
    """Return the samples of groups that are whole now, in order of generation; the others wait in `unscored`."""
    whole: list[RewardInput] = []
    for sample in finished:
        members = unscored.setdefault(sample.group, [])
        members.append(sample)
        if len(members) == num_generations:
            whole += sorted(unscored.pop(sample.group), key=lambda member: member.key)
    return whole


def _parts(futures: Sequence[Future[list[tuple[int, Part]]]]) -> list[tuple[int, Part]]:
    """Wait for the outcomes of all calls, in order. A reward may take long: an interrupt is seen meanwhile."""
    waiting = set(futures)
    while waiting:
        if interrupt_requested():
            raise KeyboardInterrupt
        _, waiting = wait(waiting, timeout=POLL_SECONDS)
    return [part for future in futures for part in future.result()]


def sample_columns(
    tasks: Sequence[RolloutTask], samples: Sequence[FinishedSample], call: RolloutCall
) -> dict[str, Any]:
    """Make the columns of finished samples, one task each, before anything is scored."""
    groups = [call.group(task) for task in tasks]
    return columns_of([task.row for task in tasks], groups, samples, call.params.temperature)


def columns_of(
    rows: Sequence[PromptRow], groups: Sequence[int], samples: Sequence[FinishedSample], temperature: float
) -> dict[str, Any]:
    """Make the columns of finished samples, each with its prompt and the id of its group."""
    completions = Jagged.from_rows([sample.completion_ids for sample in samples], torch.int64)
    prompts = Jagged.from_rows([list(row.prompt_ids) for row in rows], torch.int64)
    keys = torch.tensor([SampleKey(sample.id) for sample in samples], dtype=torch.int64).view(-1, 2)

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
        "temperature": torch.full((len(samples),), temperature, dtype=torch.float64),
        "group": torch.tensor(groups, dtype=torch.int64),
        "trajectory": keys[:, 0],
        "turn": keys[:, 1],
        "finish_reason": [sample.finish_reason for sample in samples],
        "prompt": [row.prompt for row in rows],
        "row": [dict(row.columns) for row in rows],
    }


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
    return [one if one is first[one.function, one.reason] else replace(one, detail="") for one in failures]


def logged_means(result: RewardResult) -> MetricSums:
    """Return what reward functions gave to log_metric, as means over samples."""
    logged = MetricSums()
    for name, numbers in result.metrics.items():
        logged.mean(name, sum(n * count for n, count in numbers), sum(count for _, count in numbers))
    return logged
