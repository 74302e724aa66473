"""The stream of groups whose samples are completions: the engine makes each in one go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from hybrid_rl.batch import Batch
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import Beginning, FinishedSample, RolloutRequest, SamplingParams, SlotUse, derive_seed
from hybrid_rl.engines.engine_client import Handle
from hybrid_rl.metrics.metric_sums import MetricSums, Timings
from hybrid_rl.process import progress
from hybrid_rl.rewards import RewardInput, RewardRunner, TrainerState
from hybrid_rl.rewards.results import Part
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.held_files import check_tokens
from hybrid_rl.rollout.held_json import check, read_fields
from hybrid_rl.rollout.hold_rule import HeldPrompt
from hybrid_rl.rollout.lengths import expected_length
from hybrid_rl.rollout.sample_columns import (
    MAX_SUBMISSIONS,
    columns_of,
    first_in_full,
    logged_means,
    reward_columns,
    reward_input,
    whole_groups,
)
from hybrid_rl.rollout.stream import GroupStream, awaited

Scoring = Future[list[tuple[int, Part]]]


@dataclass(eq=False)
class CompletionGroup:
    """A group of samples of one prompt. born: the training step that began it. requests: by trajectory, as they were at
    first; finished: samples by trajectory; begun: the beginnings of the others. whole_in: the state of the run when it
    became whole, which reward functions are told; scoring: their calls. texts, inputs: of its finished samples, decoded
    and as reward functions are given them, made once. expected: tokens that earlier completions had on average; None =
    not known."""

    row: PromptRow
    group: int
    born: int
    requests: dict[int, RolloutRequest]
    finished: dict[int, FinishedSample] = field(default_factory=dict)
    begun: dict[int, Beginning] = field(default_factory=dict)
    whole_in: TrainerState | None = None
    scoring: Scoring | None = None
    texts: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, RewardInput] = field(default_factory=dict)
    expected: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of its samples are complete."""
        return len(self.finished) == len(self.requests)

    @property
    def is_scored(self) -> bool:
        """Whether it has its rewards, will have them, or a function has failed to give them."""
        calls = self.scoring
        return calls is not None and not (calls.done() and (calls.cancelled() or calls.exception() is not None))

    def forget_failure(self) -> None:
        """Have its rewards asked for again if a function has failed to give them. A call that could not be ended and
        may still run is not repeated."""
        if self.scoring is None or not self.scoring.done() or not self.is_scored:
            return
        outcomes = [outcome for _, (_, outcome) in self.scoring.result()]
        if any((one.failure or one.errors) and not one.is_left_behind for one in outcomes):
            self.scoring = None

    @property
    def samples(self) -> list[FinishedSample]:
        """The samples of a whole group, by trajectory."""
        return [self.finished[trajectory] for trajectory in self.requests]

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that made its oldest token; None if it has none."""
        # It is asked for at every look, and the versions of a sample only grow: the first token is the oldest.
        made = (*(sample.versions for sample in self.finished.values()), *(one.versions for one in self.begun.values()))
        return min((versions[0] for versions in made if versions), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated for it."""
        finished = sum(len(sample.completion_ids) for sample in self.finished.values())
        return finished + self.num_begun

    @property
    def num_begun(self) -> int:
        """Tokens of its completions that were broken off."""
        return sum(len(one.token_ids) for one in self.begun.values())

    @property
    def num_again(self) -> int:
        """Tokens that an engine has computed and will compute again, before it goes on: those of completions that were
        broken off, and of their prompt, once."""
        return self.num_begun + len(self.row.prompt_ids) if self.num_begun else 0

    @property
    def num_missing(self) -> int:
        """Tokens that may be expected to be generated for it yet."""
        return sum(self.missing(request) for request in self.remaining())

    def prompt(self, data_rank: int) -> HeldPrompt:
        """Return what the driver knows of it. data_rank: which of the ranks that have samples of their own holds it."""
        params = next(iter(self.requests.values())).params
        oldest = self.oldest_version
        return HeldPrompt(self.row, len(self.requests), params.temperature, oldest, data_rank, self.num_missing)

    def remaining(self) -> Iterator[RolloutRequest]:
        """Yield requests for the rest of its samples."""
        for trajectory, request in self.requests.items():
            if trajectory not in self.finished:
                yield dataclasses.replace(request, begun=self.begun.get(trajectory, Beginning()))

    def missing(self, request: RolloutRequest) -> int:
        """Return how many tokens may be expected of one of its `remaining` requests yet. Examples are its samples that
        have finished, and the earlier completions of the prompt."""
        known = [len(sample.completion_ids) for sample in self.finished.values()]
        if self.expected is not None:
            known.append(self.expected)
        num_tokens, limit = len(request.begun.token_ids), request.params.max_tokens
        return max(0, expected_length(num_tokens, known, limit) - num_tokens)

    def take(self, sample: FinishedSample) -> None:
        """Take a sample that has finished, or that was broken off."""
        if sample.finish_reason == "abort":
            self.begun[sample.id] = Beginning(
                tuple(sample.completion_ids), tuple(sample.logprobs), tuple(sample.versions)
            )
        else:
            self.finished[sample.id] = sample
            self.begun.pop(sample.id, None)

    def drop(self) -> None:
        """Forget rewards that nobody waits for. Calls that run already run to their end."""
        if self.scoring is not None:
            self.scoring.cancel()

    def copied(self) -> CompletionGroup:
        """Return a copy that can go on while this one stays as it is: a step may be taken back."""
        changing: Any = {name: {**getattr(self, name)} for name in ("finished", "begun", "texts", "inputs")}
        return dataclasses.replace(self, **changing)

    def to_json(self) -> dict[str, Any]:
        """Return everything but pending rewards, in what JSON can hold exactly."""
        first = next(iter(self.requests.values()))
        return {
            "row": dataclasses.asdict(self.row),
            "group": self.group,
            "born": self.born,
            "prompt_ids": list(first.prompt_ids),
            "params": dataclasses.asdict(first.params),
            "seeds": {trajectory: request.params.seed for trajectory, request in self.requests.items()},
            "finished": {trajectory: dataclasses.asdict(sample) for trajectory, sample in self.finished.items()},
            "begun": {trajectory: dataclasses.asdict(one) for trajectory, one in self.begun.items()},
            "whole_in": None if self.whole_in is None else dataclasses.asdict(self.whole_in),
            "expected": self.expected,
        }

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> CompletionGroup:
        """Make the group that `to_json` described. Raises CheckpointError, with a key, for anything else."""
        kept = read_fields(_Kept, fields, "")
        check_tokens(kept.prompt_ids, "prompt_ids")
        check(bool(kept.prompt_ids), "prompt_ids", kept.prompt_ids, "at least one token")
        check_tokens(kept.row.prompt_ids, "row.prompt_ids")
        check(bool(kept.seeds), "seeds", kept.seeds, "the seeds of a group's samples")
        for trajectory, sample in kept.finished.items():
            key = f"finished.{trajectory}"
            check(trajectory in kept.seeds and sample.id == trajectory, f"{key}.id", sample.id, "one of the samples")
            check(sample.finish_reason != "abort", f"{key}.finish_reason", "abort", "that of a whole sample")
            check_tokens(sample.completion_ids, f"{key}.completion_ids", sample.versions, sample.logprobs)
        for trajectory, begun in kept.begun.items():
            is_open = trajectory in kept.seeds and trajectory not in kept.finished
            check(is_open, f"begun.{trajectory}", begun, "of an unfinished sample")
            check_tokens(begun.token_ids, f"begun.{trajectory}.token_ids", begun.versions, begun.logprobs)
        requests = {
            trajectory: RolloutRequest(
                trajectory, kept.prompt_ids, dataclasses.replace(kept.params, seed=seed), group=kept.group
            )
            for trajectory, seed in kept.seeds.items()
        }
        rest: Any = {"whole_in": kept.whole_in, "expected": kept.expected}
        return cls(kept.row, kept.group, kept.born, requests, kept.finished, kept.begun, **rest)


@dataclass(frozen=True)
class _Kept:
    """What `CompletionGroup.to_json` gives."""

    row: PromptRow
    group: int
    born: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seeds: dict[int, int]
    finished: dict[int, FinishedSample]
    begun: dict[int, Beginning]
    whole_in: TrainerState | None
    expected: int | None = None


def in_order(groups: Iterable[CompletionGroup]) -> list[RolloutRequest]:
    """Return requests for the rest of these groups in the order in which they should start: what is begun already goes
    first, then what may be expected to take longest. Samples of a group that have not begun stay together: they share
    the keys and values of their prompt."""
    requests = [(request, group.missing(request)) for group in groups for request in group.remaining()]
    requests.sort(key=lambda pair: (not pair[0].begun.token_ids, -pair[1]))
    return [request for request, _ in requests]


class CompletionStream(GroupStream[CompletionGroup]):
    """Makes groups of completions. Without a rule their samples are scored while others are generated: whenever an
    eighth of this rank's samples has finished, those that wait get one call; by whole groups if the reward functions
    score by group. With a rule, groups are scored one by one when they are whole. If there are reward models, rewards
    are NaN until `merge_late` adds their scores.
    """

    _handle: Handle | None = None  # of what the engine runs
    _by_request: Mapping[int, CompletionGroup] = {}
    _tokens_again = 0  # that the engine computes again before what is held goes on

    def score_with(self, rewards: RewardRunner | None) -> None:
        """Score with these functions from now on, also what is held."""
        super().score_with(rewards)
        for group in (group for groups in self._held.values() for group in groups):
            group.scoring = None

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return samples as `GroupStream.run` says."""
        if call.hold is not None:
            return self._run_held(tasks, call, call.hold)
        timings, rewards = Timings(), self._rewards if call.is_scored else None
        groups = [self._begin(task, call) for task in tasks]
        group_of = {trajectory: group for group in groups for trajectory in group.requests}
        requests = [request for group in groups for request in group.requests.values()]
        futures: list[Scoring] = []
        unscored: dict[int, list[RewardInput]] = {}  # of groups that are not whole yet
        ready: list[RewardInput] = []
        num_unfinished = len(requests)
        progress.count(len(requests), "samples")
        self._client.take_use()
        with ExitStack() as stack:
            if rewards is not None and self._judges is not None:
                stack.enter_context(self._client.session())  # the judges' round finds the prefixes of this one
            with timings.measure("rollout"):
                for events in self._client.stream(requests, call.version):
                    num_unfinished -= len(events)
                    progress.advance(len(events))
                    for event in events:
                        group_of[event.id].finished[event.id] = event
                        self._text(group_of[event.id], event.id)
                    if rewards is None:
                        continue
                    finished = [self._input(group_of[event.id], event.id) for event in events]
                    if rewards.score_by == "group":
                        finished = whole_groups(unscored, finished, call.num_generations)
                    ready += finished
                    if ready and (len(ready) * MAX_SUBMISSIONS >= len(requests) or not num_unfinished):
                        futures.append(rewards.submit(ready, call.state))
                        ready = []
            use = self._client.take_use()
            batch, report = self._scored(groups, futures, timings, call)
        report.use = use
        return batch, report

    # ------------------------------------------------------------------------------------------ groups of a rule

    def _going_on(self, step: int) -> tuple[list[CompletionGroup], MetricSums]:
        groups = [group.copied() for group in self.held(step)]
        self._tokens_again = sum(group.num_again for group in groups)
        return groups, MetricSums()

    def _begin(self, task: RolloutTask, call: RolloutCall) -> CompletionGroup:
        requests = {}
        for generation in range(call.num_generations):
            seed = derive_seed(self._seed, call.params.seed, call.purpose, task.place, generation)
            trajectory, params = call.trajectory(task, generation), replace(call.params, seed=seed)
            prompt_ids = tuple(task.row.prompt_ids)
            requests[trajectory] = RolloutRequest(trajectory, prompt_ids, params, group=call.group(task))
        return CompletionGroup(task.row, call.group(task), call.state.global_step, requests, expected=task.expected)

    def _start(self, groups: Sequence[CompletionGroup], call: RolloutCall) -> None:
        self._by_request = {trajectory: group for group in groups for trajectory in group.requests}
        requests = in_order(groups)
        progress.count(len(requests), "samples")
        for group in groups:
            if group.is_whole:  # it was read from a checkpoint, its rewards failed, or the functions are others
                group.forget_failure()
                self._score(group, call)
        self._handle = self._client.submit(requests, call.version)

    def _go_on(self, num_steps: int) -> None:
        assert self._handle is not None
        for _ in range(num_steps):
            if not self._handle.num_unfinished and not self._client.is_shared:
                break
            self._client.advance(idle_seconds=0.0, can_interrupt=False)

    def _look(self, groups: Sequence[CompletionGroup], call: RolloutCall) -> None:
        assert self._handle is not None
        events = self._handle.take()
        progress.advance(sum(event.finish_reason != "abort" for event in events))
        for event in events:
            group = self._by_request[event.id]
            group.take(event)
            if group.is_whole:
                group.whole_in = call.state
                self._score(group, call)

    def _break_off(self) -> None:
        assert self._handle is not None
        self._client.cancel(self._handle)
        is_first = True  # ranks that share an engine take the same number of steps
        while (is_first or self._client.is_busy) if self._client.is_shared else self._handle.num_unfinished:
            self._client.advance(idle_seconds=0.0, can_interrupt=False)
            is_first = False

    def _taken(
        self, groups: Sequence[CompletionGroup], timings: Timings, call: RolloutCall
    ) -> tuple[Batch, RolloutReport]:
        for group in groups:
            self._score(group, call)
        return self._scored(groups, [group.scoring for group in groups if group.scoring is not None], timings, call)

    def _num_begun(self, groups: Sequence[CompletionGroup]) -> int:
        return sum(group.num_begun for group in groups)

    def _num_left(self, groups: Sequence[CompletionGroup]) -> int:
        return sum(group.num_tokens for group in groups)

    def _use(self) -> SlotUse:
        use = self._client.take_use()
        if use.cost is not None:
            use.cost.tokens_again, use.cost.waited_seconds = self._tokens_again, self._waited_seconds
        return use

    def _drop(self, groups: Sequence[CompletionGroup]) -> None:
        for group in groups:
            group.drop()

    def _read_group(self, fields: Mapping[str, Any]) -> CompletionGroup:
        return CompletionGroup.of_json(fields)

    # ---------------------------------------------------------------------------------------------------- rewards

    def _text(self, group: CompletionGroup, trajectory: int) -> str:
        if trajectory not in group.texts:
            group.texts[trajectory] = self._decode(group.finished[trajectory].completion_ids)
        return group.texts[trajectory]

    def _input(self, group: CompletionGroup, trajectory: int) -> RewardInput:
        if trajectory not in group.inputs:
            sample, text = group.finished[trajectory], self._text(group, trajectory)
            group.inputs[trajectory] = reward_input(sample, group.row, text, group.group, self._decode)
        return group.inputs[trajectory]

    def _score(self, group: CompletionGroup, call: RolloutCall) -> None:
        """Have a whole group scored, unless it is already."""
        if self._rewards is not None and call.is_scored and not group.is_scored:
            inputs = [self._input(group, trajectory) for trajectory in group.requests]
            group.scoring = self._rewards.submit(inputs, group.whole_in)

    def _scored(
        self, groups: Sequence[CompletionGroup], futures: Sequence[Scoring], timings: Timings, call: RolloutCall
    ) -> tuple[Batch, RolloutReport]:
        """Return the samples of whole groups with their rewards, once they are there. futures: of their calls."""
        rewards = self._rewards if call.is_scored else None
        places = [(group, trajectory) for group in groups for trajectory in group.requests]
        samples = [group.finished[trajectory] for group, trajectory in places]
        rows, ids = [group.row for group, _ in places], [group.group for group, _ in places]
        columns = columns_of(rows, ids, samples, call.params.temperature)
        columns["completion"] = [self._text(*place) for place in places]
        with timings.measure("reward"), progress.doing("rewards"):
            parts = [part for made in awaited(futures) for part in made]
        if rewards is None:
            return Batch(columns), RolloutReport(timings.seconds)
        result = rewards.join([self._input(*place) for place in places], parts)
        batch = Batch({**columns, **reward_columns(result, is_dense=rewards.is_dense)})
        report = RolloutReport(timings.seconds, first_in_full(result.failures), logged_means(result), result.retried)
        return self._judged(batch, report, timings, call)
