"""The stream of groups whose samples are completions: the engine makes each in one go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from hybrid_rl.batch import Batch
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import Beginning, FinishedSample, RolloutRequest, SamplingParams, SlotUse, derive_seed
from hybrid_rl.engines.engine_client import Handle
from hybrid_rl.metrics.metric_sums import Timings
from hybrid_rl.process import progress
from hybrid_rl.rewards import RewardInput, RewardRunner, TrainerState
from hybrid_rl.rewards.results import Part
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.deferred_scores import LateScores
from hybrid_rl.rollout.held_files import check_tokens
from hybrid_rl.rollout.held_json import check, read_fields
from hybrid_rl.rollout.hold_rule import HeldPrompt, HoldRule
from hybrid_rl.rollout.judged import Asked
from hybrid_rl.rollout.lengths import expected_length
from hybrid_rl.rollout.sample_columns import MAX_SUBMISSIONS, columns_of, reward_input
from hybrid_rl.rollout.stream import GroupStream, awaited

Scoring = Future[list[tuple[int, Part]]]


@dataclass(eq=False)
class CompletionGroup:
    """A group of samples of one prompt, of which checkpoints keep the arguments. born: the training step that began it.
    params: of all its samples; seeds: of each, by trajectory; finished: samples by trajectory; begun: the beginnings of
    the others. whole_in: the state of the run when it became whole, which reward functions are told. expected: tokens
    that earlier completions had on average; None = not known.

    requests: by trajectory, as they were at first. scoring: calls of reward functions. texts, inputs: of its finished
    samples, decoded and as reward functions are given them, made once."""

    has_agents: ClassVar = False

    row: PromptRow
    group: int
    born: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seeds: dict[int, int]
    finished: dict[int, FinishedSample] = field(default_factory=dict)
    begun: dict[int, Beginning] = field(default_factory=dict)
    whole_in: TrainerState | None = None
    expected: int | None = None
    requests: dict[int, RolloutRequest] = field(init=False)
    scoring: Scoring | None = field(init=False, default=None)
    texts: dict[int, str] = field(init=False, default_factory=dict)
    inputs: dict[int, RewardInput] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = {
            trajectory: RolloutRequest(trajectory, self.prompt_ids, replace(self.params, seed=seed), group=self.group)
            for trajectory, seed in self.seeds.items()
        }

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
        if any((outcome.failure or outcome.errors) and not outcome.is_left_behind for outcome in outcomes):
            self.scoring = None

    @property
    def samples(self) -> list[FinishedSample]:
        """The samples of a whole group, by trajectory."""
        return [self.finished[trajectory] for trajectory in self.requests]

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that made its oldest token; None if it has none."""
        # It is asked for at every look, and the versions of a sample only grow: the first token is the oldest.
        made = (
            *(sample.versions for sample in self.finished.values()),
            *(beginning.versions for beginning in self.begun.values()),
        )
        return min((versions[0] for versions in made if versions), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens of its completions that are whole."""
        return sum(len(sample.completion_ids) for sample in self.finished.values())

    @property
    def num_begun(self) -> int:
        """Tokens of its completions that were broken off."""
        return sum(len(beginning.token_ids) for beginning in self.begun.values())

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
        oldest, temperature = self.oldest_version, self.params.temperature
        return HeldPrompt(self.row, len(self.seeds), temperature, oldest, data_rank, self.num_missing)

    def remaining(self) -> Iterator[RolloutRequest]:
        """Yield requests for the rest of its samples."""
        for trajectory, request in self.requests.items():
            if trajectory not in self.finished:
                yield replace(request, begun=self.begun.get(trajectory, Beginning()))

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

    def end(self) -> None:
        """Forget rewards that nobody waits for. Calls that run already run to their end."""
        if self.scoring is not None:
            self.scoring.cancel()

    def copied(self) -> CompletionGroup:
        """Return a copy that can go on while this one stays as it is: a step may be taken back."""
        group = copy(self)
        for name in ("finished", "begun", "texts", "inputs"):
            setattr(group, name, {**getattr(self, name)})
        return group

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> CompletionGroup:
        """Make the group that a checkpoint has. Raises CheckpointError, with a key, for anything else."""
        group = read_fields(cls, fields, "")
        check_tokens(group.prompt_ids, "prompt_ids")
        check(bool(group.prompt_ids), "prompt_ids", group.prompt_ids, "at least one token")
        check_tokens(group.row.prompt_ids, "row.prompt_ids")
        check(bool(group.seeds), "seeds", group.seeds, "the seeds of a group's samples")
        for trajectory, sample in group.finished.items():
            key = f"finished.{trajectory}"
            check(trajectory in group.seeds and sample.id == trajectory, f"{key}.id", sample.id, "one of the samples")
            check(sample.finish_reason != "abort", f"{key}.finish_reason", "abort", "that of a whole sample")
            check_tokens(sample.completion_ids, f"{key}.completion_ids", sample.versions, sample.logprobs)
        for trajectory, begun in group.begun.items():
            is_open = trajectory in group.seeds and trajectory not in group.finished
            check(is_open, f"begun.{trajectory}", begun, "of an unfinished sample")
            check_tokens(begun.token_ids, f"begun.{trajectory}.token_ids", begun.versions, begun.logprobs)
        return group


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
    score by group; judges that are the engine itself are asked about each group as soon as it is whole. With a rule,
    groups are scored one by one when they are whole, and by such judges in a round about those that the step takes,
    which begins with the step if these are whole then. If there are reward models, rewards are NaN until `merge_late`
    adds their scores.
    """

    group_type = CompletionGroup
    _handle: Handle | None = None  # of what the engine runs
    _by_request: Mapping[int, CompletionGroup] = {}
    _tokens_again = 0  # that the engine computes again before what is held goes on
    _early: Mapping[int, Asked] | None = None  # what judges were asked before the step generated, by group

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
        ready: list[RewardInput] = []
        judges, asked = self._judges if rewards is not None else None, dict[int, Asked]()
        names, late = dict.fromkeys(name for task in tasks for name in task.row.columns), None
        num_unfinished = len(requests)
        progress.count(len(requests), "samples")
        self._client.take_use()
        with ExitStack() as stack:
            if judges is not None:
                stack.enter_context(self._client.session())  # judges find the prefixes of the samples
            with timings.measure("rollout"):
                for events in self._client.stream(requests, call.version):
                    num_unfinished -= len(events)
                    progress.advance(len(events))
                    for event in events:
                        group = group_of[event.id]
                        group.finished[event.id] = event
                        self._text(group, event.id)
                        if rewards is not None and rewards.score_by != "group":
                            ready.append(self._input(group, event.id))
                        elif rewards is not None and group.is_whole:
                            ready += [self._input(group, trajectory) for trajectory in group.requests]
                        if judges is not None and group.is_whole:  # they fill the slots that the tail leaves
                            asked[group.group] = judges.begin(Batch(self._columns([group], call)), call, names)
                    is_due = len(ready) * MAX_SUBMISSIONS >= len(requests) or not num_unfinished
                    if rewards is not None and ready and is_due:
                        futures.append(rewards.submit(ready, call.state))
                        ready = []
            use = self._client.take_use()
            if judges is not None:
                use = replace(use, cost=None)  # a part of it is that of judges
                with timings.measure("judge"):
                    late = judges.scores([asked[group.group] for group in groups], call)
            batch, report = self._scored(groups, futures, timings, call, late)
        report.use = use
        return batch, report

    # ------------------------------------------------------------------------------------------ groups of a rule

    def _going_on(self, step: int) -> list[CompletionGroup]:
        groups = [group.copied() for group in self.held(step)]
        self._tokens_again = sum(group.num_again for group in groups)
        return groups

    def _begin(self, task: RolloutTask, call: RolloutCall) -> CompletionGroup:
        parts, row = (self._seed, call.params.seed, call.purpose, task.place), task.row
        numbers = range(call.num_generations)
        seeds = {call.trajectory(task, number): derive_seed(*parts, number) for number in numbers}
        whose = (call.group(task), call.state.global_step, tuple(row.prompt_ids), call.params)
        return CompletionGroup(row, *whose, seeds, expected=task.expected)

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

    def judge_early(self, groups: Sequence[CompletionGroup], call: RolloutCall, rule: HoldRule) -> None:
        self._early, judges = None, self._judges
        if judges is None or not call.is_scored:
            return
        held = [group for group in groups if group.born < call.state.global_step]
        keys = [rule.key(group, call.version) for group in held if group.is_whole]
        everywhere = self._agreed(lambda: (keys, rule.standing(held, call.version)))
        standings = [standing for _, standing in everywhere]
        all_keys = [key for of_rank, _ in everywhere for key in of_rank]
        is_known = not any(standing.num_unfinished for standing in standings) and len(all_keys) >= rule.num_wanted
        if call.is_refill or not is_known:  # with partial rollouts an older group may become whole meanwhile
            return
        chosen = rule.chosen(all_keys, standings, call.version)
        mine = [group for group in held if group.group in chosen]
        names = dict.fromkeys(name for group in mine for name in group.row.columns)

        def ask() -> None:
            self._early = {
                group.group: judges.begin(Batch(self._columns([group], call)), call, names) for group in mine
            }

        self._agreed(ask)  # a question that cannot be written fails on all ranks

    def _taken(
        self, groups: Sequence[CompletionGroup], timings: Timings, call: RolloutCall
    ) -> tuple[Batch, RolloutReport]:
        for group in groups:
            self._score(group, call)
        futures, late = [group.scoring for group in groups if group.scoring is not None], None
        if self._judges is not None and self._early is not None:
            with timings.measure("judge"):
                late = self._judges.scores([self._early[group.group] for group in groups], call)
        return self._scored(groups, futures, timings, call, late)

    def _num_begun(self, groups: Sequence[CompletionGroup]) -> int:
        return sum(group.num_begun for group in groups)

    def _use(self) -> SlotUse:
        use = self._client.take_use()
        if self._early is not None:
            return replace(use, cost=None)  # a part of it is that of judges
        if use.cost is not None:
            use.cost.tokens_again, use.cost.waited_seconds = self._tokens_again, self._waited_seconds
        return use

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

    def _columns(self, groups: Sequence[CompletionGroup], call: RolloutCall) -> dict[str, Any]:
        """Return the columns of the samples of whole groups, without their rewards."""
        places = [(group, trajectory) for group in groups for trajectory in group.requests]
        samples = [group.finished[trajectory] for group, trajectory in places]
        rows, ids = [group.row for group, _ in places], [group.group for group, _ in places]
        columns = columns_of(rows, ids, samples, call.params.temperature, self._client.experts_shape)
        return columns | {"completion": [self._text(*place) for place in places]}

    def _scored(
        self,
        groups: Sequence[CompletionGroup],
        futures: Sequence[Scoring],
        timings: Timings,
        call: RolloutCall,
        late: LateScores | None = None,
    ) -> tuple[Batch, RolloutReport]:
        """Return the samples of whole groups with their rewards, once they are there. futures: of their calls; late: of
        judges, if they were asked before."""
        rewards, columns = self._rewards if call.is_scored else None, self._columns(groups, call)
        with timings.measure("reward"), progress.doing("rewards"):
            parts = [part for made in awaited(futures) for part in made]
        if rewards is None:
            return Batch(columns), RolloutReport(timings.seconds)
        inputs = [self._input(group, trajectory) for group in groups for trajectory in group.requests]
        return self._rewarded(columns, rewards.join(inputs, parts), timings, call, late)
