"""The collector: everything before learning, as the driver sees it. Prompts go to the workers, [N]-sized columns come
back."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from hybrid_rl.batch import AnyBatch, Trajectories
from hybrid_rl.batch.rollout_files import load_rollout
from hybrid_rl.batch.temperature import sampling_temperature
from hybrid_rl.batch.trajectories import key_order
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.data.sampler import PromptSampler
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import DataError, counted
from hybrid_rl.metrics.metric_sums import Timings
from hybrid_rl.rewards import TrainerState
from hybrid_rl.rewards.results import cause_of
from hybrid_rl.rollout.call import TRAINING, RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.counters import GREEDY, Collected, Tally
from hybrid_rl.rollout.held_files import check_row
from hybrid_rl.rollout.hold_rule import HeldPrompt, HoldRule
from hybrid_rl.rollout.lengths import LengthRecord, group_lengths, length_metrics
from hybrid_rl.rollout.pending_prompts import PendingPrompts
from hybrid_rl.rollout.refill import Refill
from hybrid_rl.rollout.reward_metrics import baseline_metrics, dataset_metrics, reward_metrics, success_rates
from hybrid_rl.rollout.successes import FIRST_FUNCTION, SuccessRule
from hybrid_rl.rollout.task_split import TaskList, split_off
from hybrid_rl.rollout.time_saved import SecondsWon

logger = logging.getLogger("hybrid_rl")


class RolloutGroup(Protocol):
    """The ranks that a collector gets samples from."""

    def rollout(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[AnyBatch, list[RolloutReport]]:
        """Return scored samples of these prompts, in any order, and a report of each rank that had some."""
        ...

    def demonstrations(self, tasks: list[RolloutTask], call: RolloutCall) -> tuple[AnyBatch, list[RolloutReport]]:
        """Return the dataset's own completions of these prompts, in the same form."""
        ...

    def begin(self, tasks: list[RolloutTask], call: RolloutCall) -> None:
        """Begin these prompts, for later steps, and return at once."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """What the batch of every training step is made of.

    sampler: where the prompts come from.
    num_prompts: of a batch; each has num_generations samples, whose tokens are chosen as `params` says.
    max_refills: 0 keeps all groups. Otherwise groups without signal are dropped, and other prompts take their place, in
        at most so many further rollouts (`Refill`).
    greedy_baseline: whether one greedy sample per prompt of the batch is scored too, whose reward becomes the column
        `baseline_rewards` (ReMax, arXiv:2310.10505).
    rollouts_path: folder of saved rollouts, which take the place of new ones; None = none.
    replays_experts: whether saved rollouts need a record of the experts that the engine chose.
    demonstrates: whether the completions are the data set's own.
    hold: which groups a step takes, and which it holds or drops; num_extra: prompts that are under way beyond
        num_prompts; num_later: of those, the ones that are ahead of the batch and made by ranks that generate while it
        trains: what a step begins of them, it begins when its batch has come.
    """

    sampler: PromptSampler
    num_prompts: int
    num_generations: int
    params: SamplingParams
    max_refills: int = 0
    greedy_baseline: bool = False
    rollouts_path: Path | None = None
    replays_experts: bool = False
    demonstrates: bool = False
    hold: HoldRule | None = None
    num_extra: int = 0
    num_later: int = 0

    def num_begun(self, step: int) -> int:
        """Return how many prompts a training step takes: with groups that are held the first takes more."""
        drops = self.hold is not None and self.hold.drops
        return self.num_prompts + (self.num_extra if step == 1 or drops else 0)

    @property
    def kept(self) -> dict[str, float]:
        """The settings that do not change while groups are held."""
        return {"num_generations": self.num_generations, "temperature": self.params.temperature}


class Collector:
    """Collects scored samples from a worker group.

    reward_names, reward_weights: of the reward functions; weights None: 1 each. shaping: places of those that do not
    say who is right (`shaping_reward`), by which dynamic sampling does not judge groups.
    plan: of training steps; None if only `rollout` is called.
    max_failure_share: of the samples that may have no reward.
    success: what counts as a success; None = it is not known.
    """

    def __init__(
        self,
        workers: RolloutGroup,
        reward_names: Sequence[str],
        plan: StepPlan | None = None,
        *,
        max_failure_share: float,
        reward_weights: Sequence[float] | None = None,
        shaping: Collection[int] = (),
        success: SuccessRule | None = FIRST_FUNCTION,
    ) -> None:
        self._workers, self._plan, self._rule = workers, plan, success
        self._names = tuple(reward_names)
        self._weights = tuple(reward_weights) if reward_weights is not None else (1.0,) * len(self._names)
        self._max_failure_share, self._shaping = max_failure_share, shaping
        self._next_id = 0
        self.num_voids = 0  # how often recorded turns became void
        self._told: set[object] = set()
        self._open, self._lengths, self._won = PendingPrompts(), LengthRecord(), SecondsWon()

    def after(self, other: Collector, step: int) -> Collector:
        """Take the place of another collector after a training step: ids go on from its, and nothing is told twice.
        Returns this one.

        Raises ConfigError if groups are held that do not fit the plan of this one.
        """
        self._next_id, self._told, self.num_voids = other._next_id, other._told, other.num_voids
        self._open, self._lengths, self._won = other._open, other._lengths, other._won
        if self._plan is not None and other._plan is not None:
            self._open.check(step, other._plan.kept, self._plan.kept)
        return self

    def take(self, version: int, state: TrainerState) -> Collected:
        """Take the batch of the training step in `state`, for a learner at this policy version.

        The noise of a sample depends on the seed, the step, the rollout within the step and its place there only.
        Raises NoSignalError if groups are missing after the last rollout.
        """
        plan = self._plan
        assert plan is not None, "this collector was made without a plan of training steps"
        if plan.rollouts_path is not None:
            num_begun = plan.num_begun(state.global_step)
            plan.sampler.take(num_begun)  # so that position and epoch are those of the recorded run
            collected = replay(plan, state.global_step, self._names, version)
            if not plan.max_refills:  # as below
                collected.metrics.update(self._success(collected.batch))
            return collected
        self._lengths.begin(state.global_step)
        if plan.hold is not None:
            self._next_id = self._open.begin(state.global_step, self._next_id)
        num_generations, purpose = 1 if plan.demonstrates else plan.num_generations, f"{TRAINING}{state.global_step}"
        what = (num_generations, plan.params, version, state, purpose, self._next_id)
        call = RolloutCall(*what, num_voids=self.num_voids)
        tally = Tally(self._max_failure_share, self._next_id, self._won)
        if plan.demonstrates:
            tasks, call = self._tasks(plan.sampler.take(plan.num_prompts), call, self._lengths)
            return tally.collected(self._counted(self._workers.demonstrations(tasks, call), call, tally), {})
        refill = Refill(plan.num_prompts, plan.max_refills, self._weights, self._shaping)
        parts, later = list[tuple[list[PromptRow], Any]](), None
        while refill.num_missing:
            begun, tasks, round_call = self._round(plan, call, refill)
            if plan.hold is not None and plan.num_later and not round_call.is_refill:
                tasks, next_tasks = split_off(tasks, plan.num_later)
                # When the step ends all that is ahead is whole: the batch of the next step, and those after it.
                rule = replace(plan.hold, ahead=plan.num_later - plan.num_prompts)
                later = next_tasks, replace(round_call, hold=rule)
            answer = self._workers.rollout(tasks, round_call)
            made = self._counted(answer, round_call, tally)
            rows = [begun[group] for group in sorted(begun)]
            if round_call.hold is not None:
                loads = {part: report.num_missing for part, report in enumerate(answer[1])}
                rows = self._open.deliver(made, begun, state.global_step, loads, drops=round_call.hold.drops)
            self._observe(plan.sampler, rows, made)
            parts += refill.kept(rows, made)
            del answer, made  # so that nothing keeps the dropped samples while the next are made
            refill.check(state.global_step)
        rows, batch = joined_groups(parts)
        metrics = dict[str, float]()
        if plan.max_refills:
            metrics |= refill.metrics()
        if plan.greedy_baseline:
            batch = self._with_baseline(rows, batch, call, tally)
            metrics |= baseline_metrics(batch)
        metrics |= reward_metrics(batch, self._names) | dataset_metrics(rows, batch) | plan.sampler.metrics()
        if not plan.max_refills:  # of the groups that were kept each has a success
            metrics |= self._success(batch)
        if later is not None:
            self._workers.begin(*later)
        collected = tally.collected(batch, metrics | tally.use())
        self._warn_of_no_numbers(collected.logged, state.global_step)
        return collected

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what a resumed run needs after a training step."""
        return self._open.state_dict(step, self._next_id) | {"lengths": self._lengths.state_dict(step)}

    def load_state_dict(self, state: Mapping[str, Any], held: Mapping[int, HeldPrompt], step: int) -> None:
        """Continue after a training step, with the prompts of the groups that are held then.

        Raises CheckpointError if groups are missing, ConfigError if they cannot go on under the plan of this run.
        """
        rule, kept = (None, {}) if self._plan is None else (self._plan.hold, self._plan.kept)
        self._open.load_state_dict(state, held, step, rule, kept)
        self._next_id = state["next_id"]
        self._lengths.load_state_dict(state.get("lengths", {}))

    def _warn_of_no_numbers(self, logged: Mapping[str, float], step: int) -> None:
        """Warn, once for each name, of means that records leave out because JSON has no such numbers."""
        for name, value in logged.items():
            if not math.isfinite(value) and name not in self._told:
                self._told.add(name)
                logger.warning(
                    "step %d: the mean of what a reward function gave to log_metric(%r, ...) is %s: metrics.jsonl "
                    "and trackers cannot hold that, and lack it in such steps; log finite numbers only",
                    *(step, name, value),
                )

    def _success(self, batch: AnyBatch) -> dict[str, float]:
        return {} if self._rule is None else self._rule.metrics(batch)

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
        """Return samples for these prompts, group by group, scored while others are still being generated."""
        call = RolloutCall(num_generations, params, version, state, purpose, self._next_id, is_scored)
        tally = Tally(self._max_failure_share, self._next_id)
        batch = self._roll_out(rows, call, tally, LengthRecord())  # rows of other data have the same numbers
        if not is_scored:
            return tally.collected(batch, {})
        return tally.collected(batch, reward_metrics(batch, self._names) | self._success(batch))

    def _roll_out(self, rows: Sequence[PromptRow], call: RolloutCall, tally: Tally, lengths: LengthRecord) -> AnyBatch:
        """Return samples for these prompts in their order."""
        tasks, call = self._tasks(rows, call, lengths)
        return self._counted(self._workers.rollout(tasks, call), call, tally)

    def _tasks(
        self,
        rows: Sequence[PromptRow],
        call: RolloutCall,
        lengths: LengthRecord,
        loads: Mapping[int, int] | None = None,
    ) -> tuple[TaskList, RolloutCall]:
        """Return a task for each prompt, and the call with ids that no other call has. lengths: of earlier completions
        of these prompts; loads: tokens that ranks have to generate besides."""
        call = replace(call, first_id=self._next_id)
        self._next_id += len(rows) * call.num_generations
        tasks = [RolloutTask(place, row, lengths.expected(row)) for place, row in enumerate(rows)]
        return TaskList(tasks, call, loads or {}), call

    def _counted(self, answer: tuple[AnyBatch, Sequence[RolloutReport]], call: RolloutCall, tally: Tally) -> AnyBatch:
        """Return the samples that a call made, in the order of its prompts, and count them."""
        batch, reports = _in_order(answer[0]), answer[1]
        tally.add(batch, reports, call)
        self._warn_of_retries(reports, call)
        return batch

    def _warn_of_retries(self, reports: Sequence[RolloutReport], call: RolloutCall) -> None:
        """Warn, once for each function, of calls that were repeated: each costs what a call costs."""
        retried: dict[str, list[tuple[int, str]]] = {}
        for function, retry in (item for report in reports for item in report.retried.items()):
            retried.setdefault(function, []).append(retry)
        for function, of_ranks in retried.items():
            number, detail = sum(number for number, _ in of_ranks), of_ranks[0][1]
            if ("retried", function) not in self._told:
                self._told.add(("retried", function))
                logger.warning(
                    "%s: a call of reward function %r failed (%s), so it was made again for %s, one by one unless "
                    "score_by=group (rewards/num_retried counts them from now on). Only samples that fail again are "
                    "masked, but after 8 identical failures the rest of the call is masked. With score_by=group an "
                    "exception masks the whole group at once",
                    *(call.purpose, function, cause_of(detail), counted(number, "sample")),
                )

    def _round(
        self, plan: StepPlan, call: RolloutCall, refill: Refill
    ) -> tuple[dict[int, PromptRow], TaskList, RolloutCall]:
        """Return all prompts of the next rollout of a step by group, a task for each that it begins, and its call."""
        rule, since = plan.hold, call.state.global_step - 1
        if refill.num_rollouts:  # it goes on with what the one before has left
            call = replace(call, purpose=f"{call.purpose}/refill/{refill.num_rollouts}", is_refill=True)
            rule, since = None if rule is None else replace(rule, wanted=refill.num_wanted), since + 1
        held = self._open.held(since)
        num_missing = refill.num_wanted + plan.num_extra - len(held)
        rows = plan.sampler.take(num_missing) if num_missing > 0 else []  # more are held if the plan was larger
        if rule is not None and not rule.drops:
            for row in rows:
                check_row(row)
        tasks, call = self._tasks(rows, replace(call, hold=rule), self._lengths, self._open.loads(since))
        return held | {call.group(task): task.row for task in tasks}, tasks, call

    def _observe(self, sampler: PromptSampler, rows: Sequence[PromptRow], batch: AnyBatch) -> None:
        """Note how long the completions of these prompts are, and tell the sampler how often they were solved, by the
        first of the user's reward functions."""
        self._lengths.observe(rows, group_lengths(batch))
        if self._rule is not None:
            sampler.observe(rows, success_rates(batch, self._rule))

    def _with_baseline(self, rows: Sequence[PromptRow], batch: AnyBatch, call: RolloutCall, tally: Tally) -> AnyBatch:
        """Return the batch with the reward of each prompt's greedy sample, float64 [N]."""
        greedy = replace(call.params, temperature=0.0)
        call = replace(call, num_generations=1, params=greedy, purpose=f"{call.purpose}{GREEDY}", hold=None)
        made = self._roll_out(rows, call, tally, self._lengths)
        rewards = made["rewards"][Trajectories.of(made).first]
        _, group = batch["group"].unique(return_inverse=True)
        return batch.with_columns(baseline_rewards=rewards[group])


def joined_groups(parts: Sequence[tuple[list[PromptRow], Any]]) -> tuple[list[PromptRow], AnyBatch]:
    """Return the groups of several rollouts with their prompts, in the order of their ids. parts: prompts in the order
    of the groups of a batch."""
    if len(parts) == 1:
        return parts[0]
    rows = {
        group: row
        for of_part, batch in parts
        for group, row in zip(batch["group"].unique_consecutive().tolist(), of_part, strict=True)
    }
    batch = type(parts[0][1]).concat([batch for _, batch in parts])
    return [rows[group] for group in sorted(rows)], _in_order(batch)


def replay(plan: StepPlan, step: int, names: Sequence[str], version: int) -> Collected:
    """Return the saved rollout of a training step in the place of a new one, as if the policy of this version had made
    it, or if groups are held, with the versions that made it. names: of the reward functions.

    Its samples are trained on at the temperature that they were made at, whatever the configuration says now.

    Raises DataError if there is none, or one of another number of prompts, samples or reward functions than the plan
    has, without the greedy baseline that is needed, or without one temperature that all samples were made at.
    """
    assert plan.rollouts_path is not None
    timings = Timings()
    with timings.measure("rollout"):
        saved = load_rollout(plan.rollouts_path, step)
    subject = f"{plan.rollouts_path}: the rollout of step {step}"
    num_prompts = len(saved.group_rows())
    if num_prompts != plan.num_prompts:
        raise DataError(
            f"{subject} has {num_prompts} prompts, but prompts_per_step={plan.num_prompts}; set it to {num_prompts}"
        )
    try:
        one_each = saved.select(Trajectories.of(saved).first)
        sampling_temperature(saved)
    except DataError as error:
        raise DataError(f"{subject}: {error}") from error
    sizes = sorted({len(rows) for rows in one_each.group_rows()})
    if sizes != [plan.num_generations]:
        raise DataError(
            f"{subject} has {sizes} samples per prompt, but num_generations={plan.num_generations}; set it as it was "
            "when the rollout was made"
        )
    num_functions = len(saved["function_rewards"][0])
    if num_functions != len(names):
        raise DataError(
            f"{subject} was scored by {num_functions} reward functions, but {len(names)} are given "
            f"({', '.join(names)}); give those that scored it"
        )
    if plan.replays_experts and "routed_experts" not in saved:
        raise DataError(
            f"{subject} has no record of experts, which routing_replay=rollout repeats; make the rollouts with it, or "
            "set routing_replay=scoring or off"
        )
    if plan.greedy_baseline and "baseline_rewards" not in saved:
        raise DataError(
            f"{subject} was made without a greedy baseline, which the algorithm needs; make the rollouts with the "
            "algorithm that they are for"
        )
    batch = saved
    if plan.hold is None:  # tokens of held groups are as old as they were
        batch = saved.without("oldest_version").with_columns(oldest_version=torch.full((saved.num_samples,), version))
    metrics = length_metrics(batch) | reward_metrics(batch, names)
    return Collected(batch, timings, metrics | (baseline_metrics(batch) if plan.greedy_baseline else {}))


def _in_order(batch: AnyBatch) -> AnyBatch:
    """Sort samples by trajectory and turn: prompt by prompt, whichever rank made them."""
    order = key_order(batch)
    return batch if torch.equal(order, torch.arange(batch.num_samples)) else batch.select(order)
