"""The stream of groups of a rank: prompts go in, and groups of samples with their rewards come out.

A group is what is sampled for one prompt. It is in one of these states:

    WAITING --begins--> RUNNING --its samples end--> WHOLE --the rule chooses it--> TAKEN --update--> TRAINED
                        |     ^                        |
          the step ends |     | the next weights       | has to wait
                        v     |                        v
                        held after a step: it goes on, or waits, in the next one

A call without a `HoldRule` (synchronous training, evaluation, generation) takes all its groups when they are whole, so
nothing is held. With a rule a step takes the groups that the rule chooses and holds the others: partial rollouts. If
it replaces groups that teach nothing, it takes groups in rounds, each of which goes on with what the last one held.
The same loop makes groups of later steps while this one trains (`go_ahead`): asynchronous training.

Which groups a step takes is a matter of counts: all ranks look at what is whole after every so many engine steps, and
end together when it is enough. No clock is asked, so a run can be repeated. Kimi k1.5 (arXiv:2501.12599, section 2.6.2)
and APRIL (arXiv:2509.18521) hold completions in this way.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Generic

from hybrid_rl.batch import Batch
from hybrid_rl.config import TrainerConfig
from hybrid_rl.engines.base import SlotUse
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import ConfigError, PeerFailedError
from hybrid_rl.metrics.metric_sums import MetricSums, Timings
from hybrid_rl.process.interrupts import interrupt_requested
from hybrid_rl.rewards import RewardResult, RewardRunner
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.deferred_scores import LateScores, merge_late
from hybrid_rl.rollout.held_files import load_held
from hybrid_rl.rollout.hold_rule import AnyGroup, Ending, HoldRule, Standing
from hybrid_rl.rollout.judged import Encode, JudgeRound
from hybrid_rl.rollout.sample_columns import first_in_full, logged_means, reward_columns, unrecorded_share

Gather = Callable[[Any], list[Any]]
POLL_SECONDS = 0.1  # how soon an interrupt is seen while rewards are awaited


class GroupStream(ABC, Generic[AnyGroup]):
    """Makes scored samples, group by group. Its subclasses say how a group is begun, generated and scored.

    decode: token ids to text without special tokens. seed: of every sample's noise. gather: the values of all ranks, by
    rank; by default there is one rank. encode: what a judge is asked, text or messages, to token ids; max_length: of a
    question with its answer, None = the engine has no limit. What is held after a step belongs to it: a step that is
    taken back begins again from what was held after the one before.

    Raises ConfigError for a judge without `encode`.
    """

    group_type: type[AnyGroup]

    def __init__(
        self,
        client: EngineClient,
        rewards: RewardRunner | None,
        decode: Callable[[Sequence[int]], str],
        *,
        seed: int,
        gather: Gather = lambda value: [value],
        encode: Encode | None = None,
        max_length: int | None = None,
    ) -> None:
        self._client, self._decode, self._seed, self._gather = client, decode, seed, gather
        self._encode, self._max_length = encode, max_length
        self._held: dict[int, list[AnyGroup]] = {}  # by the step after which they are held
        self._num_taken = 0  # tokens of the last batch
        self._waited_seconds = 0.0  # for other ranks, in the present call
        self.score_with(rewards)

    def score_with(self, rewards: RewardRunner | None) -> None:
        """Score with these functions from now on, also what is held."""
        self._rewards = rewards
        self._judges: JudgeRound | None = None
        if rewards is not None and rewards.entries.judges:
            if self._encode is None:
                raise ConfigError(f"an EngineJudge needs the policy's tokenizer: pass encode= to {type(self).__name__}")
            self._judges = JudgeRound(
                self._client, rewards, self._decode, self._encode, seed=self._seed, max_length=self._max_length
            )

    def reconfigure(self, config: TrainerConfig) -> None:
        """Go on with a configuration that differs in what may change between steps; calls tell the rest."""

    @abstractmethod
    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Begin these prompts, and return the samples that this rank has for the call: of all of them, or of the groups
        that the call's rule takes, which may have been begun before. With a rule it is collective over all ranks.

        Raises KeyboardInterrupt if an interrupt was requested; with a rule on all ranks, if it was on one.
        """

    def _run_held(self, tasks: Sequence[RolloutTask], call: RolloutCall, rule: HoldRule) -> tuple[Batch, RolloutReport]:
        """Run a call that has a rule, collectively over all ranks. After an error nothing is alive."""
        try:
            return self._run_step(tasks, call, rule)
        except BaseException:
            self._release()
            raise

    def go_ahead(
        self, tasks: Sequence[RolloutTask], call: RolloutCall, learner: int, is_outdated: Callable[[], bool]
    ) -> tuple[bool, MetricSums, SlotUse]:
        """Begin these prompts and go on with what the step in `call` has left, until the next step has its batch, and
        the steps after it what the rule wants ahead; then everything is held. Collective over all ranks.

        learner: the version of the weights that will train on that batch. is_outdated: whether newer weights than those
        of the call wait for this rank; if they do for all, or if an interrupt was requested, everything is broken off
        as it is. Returns whether it is to be called again with newer weights, metrics, and how full the engine was.
        """
        rule, step = call.hold, call.state.global_step
        assert rule is not None, "nothing else has a next step"
        ending = Ending(rule, learner, is_outdated)
        try:
            groups, metrics = self._groups(step, tasks, call)
            with self._client.session():
                everywhere = self._generate(groups, call, ending)
            self._held[step] = groups
            metrics.merge(self._left_metrics(groups, drops=False))
            metrics.merge(self._engine_metrics())
            return ending.goes_on(everywhere), metrics, self._use()
        except BaseException:
            self._release()
            raise

    def held(self, step: int) -> list[AnyGroup]:
        """Return the groups that are held after a training step."""
        return self._held.get(step, [])

    def hold(self, step: int, groups: Sequence[AnyGroup]) -> None:
        """Hold these groups after a training step instead of what was held then; nothing of them is alive."""
        self._release()
        self._held = {step: list(groups)}

    def load(self, step: int, folder: Path, rank: int, num_ranks: int) -> None:
        """Hold after a training step what the checkpoint in this folder holds (`load_held`)."""
        self.hold(step, load_held(folder, rank, num_ranks, self.group_type))

    def close(self) -> None:
        """End what is alive between calls; idempotent."""
        self._release()

    # ------------------------------------------------------------------------------------------------- one step

    def _run_step(self, tasks: Sequence[RolloutTask], call: RolloutCall, rule: HoldRule) -> tuple[Batch, RolloutReport]:
        step, timings = call.state.global_step, Timings()
        groups, metrics = self._groups(step if call.is_refill else step - 1, tasks, call)
        with self._client.session():
            self.judge_early(groups, call, rule)
            with timings.measure("rollout"):
                self._generate(groups, call, Ending(rule, call.version))
            use = self._use()
            chosen = self._chosen(groups, call, rule)
            mine = [group for group in groups if group.group in chosen]
            left = [group for group in groups if group.group not in chosen]
            num_taken = sum(group.num_tokens for group in mine)
            self._num_taken = self._num_taken + num_taken if call.is_refill else num_taken
            of_left = self._left_metrics(left, drops=rule.drops)
            metrics.merge(self._engine_metrics())
            batch, report = self._taken(mine, timings, call)
        report.metrics.merge(metrics)
        (report.metrics if rule.drops else report.left).merge(of_left)
        report.use, report.num_missing = use, 0 if rule.drops else sum(group.num_missing for group in left)
        self._held = {at: held for at, held in self._held.items() if at >= step - 1} | {step: left}
        if rule.drops:
            self._release()  # nothing is alive that the next step needs
            for group in left:
                group.end()
            self._held[step] = []
        return batch, report

    def _groups(self, step: int, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[list[AnyGroup], MetricSums]:
        """Return what goes on after a step, with the groups of new prompts; and metrics of how many tokens it has that
        were broken off."""
        self._waited_seconds = 0.0
        groups, metrics = self._going_on(step), MetricSums()
        if call.hold is None or not call.hold.drops:
            metrics.total("buffer/continued_tokens", self._num_begun(groups))
        self._client.take_use()
        return [*groups, *(self._begin(task, call) for task in tasks)], metrics

    def judge_early(self, groups: Sequence[AnyGroup], call: RolloutCall, rule: HoldRule) -> None:
        """Have judges that are the engine asked about what the step will take, if that is whole before anything is
        generated. Collective over all ranks."""

    def _chosen(self, groups: Sequence[AnyGroup], call: RolloutCall, rule: HoldRule) -> set[int]:
        """Return the ids of the groups that the step takes, of all ranks."""
        keys = [rule.key(group, call.version) for group in groups if group.is_whole]
        everywhere = self._agreed(lambda: (keys, rule.standing(groups, call.version)))
        all_keys = [key for of_rank, _ in everywhere for key in of_rank]
        return rule.chosen(all_keys, [standing for _, standing in everywhere], call.version)

    def _generate(self, groups: Sequence[AnyGroup], call: RolloutCall, ending: Ending) -> list[Standing]:
        """Let groups go on until all ranks end, and break the rest off. Returns how far all ranks were then."""

        def begin() -> Standing:
            self._start(groups, call)
            return ending.standing(groups)

        def look() -> Standing:
            self._look(groups, call)
            return ending.standing(groups)

        everywhere = self._agreed(begin)
        while not ending.is_reached(everywhere):
            everywhere = self._agreed(look, lambda: self._go_on(ending.rule.check_steps))
        self._agreed(look, self._break_off)
        return everywhere

    def _agreed(self, action: Callable[[], Any], steps: Callable[[], None] | None = None) -> list[Any]:
        """Return what an action gives on every rank. steps: of the engine, before it. If they raise on one rank, it
        raises on all, a KeyboardInterrupt as such.

        Raises PeerFailedError if another rank failed.
        """
        result, failure = None, None
        if steps is not None and self._client.is_shared:
            steps()  # only the engine fails in them, on all ranks; `action` tells what else did, after equal steps
            steps = None
        try:
            if steps is not None:
                steps()
            result = action()
        except BaseException as error:
            failure = error
        reason = None if failure is None else f"{type(failure).__name__}: {failure}"
        start = time.perf_counter()
        outcomes = self._gather((result, reason, isinstance(failure, KeyboardInterrupt)))
        self._waited_seconds += time.perf_counter() - start
        if failure is not None:
            raise failure
        if any(is_interrupt for _, _, is_interrupt in outcomes):
            raise KeyboardInterrupt
        for rank, (_, theirs, _) in enumerate(outcomes):
            if theirs is not None:
                raise PeerFailedError(f"rank {rank} failed in its rollout: {theirs}")
        return [outcome for outcome, _, _ in outcomes]

    def _left_metrics(self, left: Sequence[AnyGroup], *, drops: bool) -> MetricSums:
        """Return what this rank does not deliver, which it holds or drops. How old the tokens of a step are is counted
        by the update (staleness/...)."""
        metrics, fate = MetricSums(), "dropped" if drops else "held"
        num_left = self._num_begun(left) + sum(group.num_tokens for group in left)
        metrics.total(f"buffer/{fate}_groups", len(left))
        metrics.total(f"buffer/{fate}_tokens", num_left)
        if not drops:
            metrics.mean("buffer/held_share", num_left, num_left + self._num_taken)
        return metrics

    def _engine_metrics(self) -> MetricSums:
        """Return what the engine did in the present call, as far as a kind of groups has metrics of it."""
        return MetricSums()

    def _rewarded(
        self,
        columns: Mapping[str, Any],
        result: RewardResult,
        timings: Timings,
        call: RolloutCall,
        late: LateScores | None = None,
    ) -> tuple[Batch, RolloutReport]:
        """Return samples with their rewards, and with the scores of judges that are the engine itself. columns: `extra`
        is what their makers gave. late: these scores; None = judges have their round now, in the session in which the
        samples were made."""
        assert self._rewards is not None
        made = reward_columns(result, is_dense=self._rewards.is_dense)
        if "extra" in columns:
            made["extra"] = [own | extra for own, extra in zip(columns["extra"], made["extra"], strict=True)]
        batch = Batch({**columns, **made})
        report = RolloutReport(timings.seconds, first_in_full(result.failures), logged_means(result), result.retried)
        if call.is_training:
            report.metrics.merge(unrecorded_share(batch))
        if self._judges is not None:
            if late is None:
                with timings.measure("judge"):
                    late = self._judges.run(batch, call, report.failures)
            report.logged.merge(late.logged)
            batch, report.failures = merge_late(batch, report.failures, self._rewards, late)
        return batch, report

    # --------------------------------------------------------------------------------------- groups of one kind

    @abstractmethod
    def _going_on(self, step: int) -> list[AnyGroup]:
        """Return the groups that are held after a step, in a state in which they can go on."""

    @abstractmethod
    def _begin(self, task: RolloutTask, call: RolloutCall) -> AnyGroup:
        """Return the group of a prompt, waiting."""

    @abstractmethod
    def _start(self, groups: Sequence[AnyGroup], call: RolloutCall) -> None:
        """Ask the engine for what these groups lack."""

    @abstractmethod
    def _go_on(self, num_steps: int) -> None:
        """Take so many steps of the engine, or fewer if it has nothing to do. Collective over the ranks that share
        it."""

    @abstractmethod
    def _look(self, groups: Sequence[AnyGroup], call: RolloutCall) -> None:
        """Give groups what the engine has finished, and have those scored that are whole."""

    @abstractmethod
    def _break_off(self) -> None:
        """Break off what the engine runs. Collective over the ranks that share it."""

    @abstractmethod
    def _taken(self, groups: Sequence[AnyGroup], timings: Timings, call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return the scored samples of whole groups."""

    @abstractmethod
    def _num_begun(self, groups: Sequence[AnyGroup]) -> int:
        """Return how many tokens were broken off of what the groups wait for."""

    @abstractmethod
    def _use(self) -> SlotUse:
        """Return how full the engine was since the groups began or went on."""

    def _release(self) -> None:
        """End everything that is alive: what is held begins again, or goes on from its tokens."""


def awaited(futures: Iterable[Future[Any]]) -> list[Any]:
    """Return the results of all futures, in order. A reward may take long: an interrupt is seen meanwhile, and raises
    KeyboardInterrupt."""
    waiting = set(futures := list(futures))
    while waiting:
        if interrupt_requested():
            raise KeyboardInterrupt
        _, waiting = wait(waiting, timeout=POLL_SECONDS)
    return [future.result() for future in futures]
