"""Partial rollouts: a step takes the groups that are whole and holds the others, which go on under the next weights.

Which groups a step takes is a matter of counts: all ranks look at what is whole after every so many engine steps, and
end together when it is enough. No clock is asked, so a run can be repeated. Kimi k1.5 (arXiv:2501.12599, section 2.6.2)
and APRIL (arXiv:2509.18521) hold completions in this way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_rl.batch import Batch
from hybrid_rl.engines.base import FinishedSample, SlotUse
from hybrid_rl.engines.client import EngineClient, Handle
from hybrid_rl.errors import PeerFailedError
from hybrid_rl.metrics import MetricSums, Timings
from hybrid_rl.process import progress
from hybrid_rl.rewards import RewardRunner
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.ending import Ending
from hybrid_rl.rollout.held import OpenGroup, Standing, in_order, load_held
from hybrid_rl.rollout.scored import RolloutReport, ScoredRollout, columns_of, reward_input

Gather = Callable[[Any], list[Any]]


class PartialRollout(ScoredRollout):
    """Makes the samples of training steps from groups that may have been begun in earlier ones. Rollouts without a
    HoldRule (evaluation, generate) run to their end.

    gather: the values of all ranks, by rank. What is held after a step belongs to it: a step that is taken back begins
    again from what was held after the one before.
    """

    def __init__(self, *arguments: Any, gather: Gather, **named: Any) -> None:
        self._held: dict[int, list[OpenGroup]] = {}  # by the step after which they are held
        self._num_delivered = 0  # tokens of the last batch
        self._waited_seconds = 0.0  # for other ranks, in the present rollout
        super().__init__(*arguments, **named)
        self._gather = gather

    def score_with(self, rewards: RewardRunner | None) -> None:
        """Score with these functions from now on, also what is held."""
        super().score_with(rewards)
        for group in (group for groups in self._held.values() for group in groups):
            group.scoring = None

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return the samples of the groups of this step that this rank has made. Collective over all ranks.

        Raises KeyboardInterrupt on all ranks if an interrupt was requested on one.
        """
        if call.hold is None:
            return super().run(tasks, call)
        rule, step, timings = call.hold, call.state.global_step, Timings()
        groups = [group.copied() for group in self.held(step - 1)]
        num_begun = sum(group.num_begun for group in groups)
        tokens_again = sum(group.num_again for group in groups)
        groups += [self._begin(task, call) for task in tasks]
        self._client.take_use()
        self._waited_seconds = 0.0
        with ExitStack() as stack:
            stack.enter_context(self._client.session())
            with timings.measure("rollout"):
                self._generate(groups, call, Ending(rule, call.version))
            use = self._client.take_use()
            if use.cost is not None:
                use.cost.tokens_again, use.cost.waited_seconds = tokens_again, self._waited_seconds
            keys = [rule.key(group, call.version) for group in groups if group.is_whole]
            told = self._agreed(lambda: (keys, rule.standing(groups, call.version)))
            all_keys = [key for of_rank, _ in told for key in of_rank]
            taken = rule.chosen(all_keys, [standing for _, standing in told], call.version)
            mine = [group for group in groups if group.group in taken]
            left = [group for group in groups if group.group not in taken]
            self._num_delivered = sum(group.num_tokens for group in mine)
            metrics = _metrics(left, self._num_delivered, num_begun, drops=rule.drops)
            if rule.drops:
                for group in left:
                    group.drop()
                left = []
            self._held = {at: held for at, held in self._held.items() if at >= step - 1} | {step: left}
            batch, report = self._delivered(mine, timings, call)
        report.metrics.merge(metrics)
        return batch, replace(report, use=use, num_missing=sum(group.num_missing for group in left))

    def go_ahead(
        self, tasks: Sequence[RolloutTask], call: RolloutCall, learner: int, is_outdated: Callable[[], bool]
    ) -> tuple[bool, MetricSums, SlotUse]:
        """Begin these prompts and go on with what the step in `call` has left, until the next step has its batch; then
        everything is held. Collective over all ranks.

        learner: the version of the weights that will train on that batch. is_outdated: whether newer weights than those
        of the call wait for this rank; if they do for all, or if an interrupt was requested, everything is broken off
        as it is. Returns whether it is to be called again with newer weights, metrics, and how full the engine was.
        """
        rule, step = call.hold, call.state.global_step
        assert rule is not None, "nothing else has a next step"
        groups = [group.copied() for group in self.held(step)]
        num_begun = sum(group.num_begun for group in groups)
        groups += [self._begin(task, call) for task in tasks]
        ending = Ending(rule, learner, is_outdated)
        self._client.take_use()
        with self._client.session():
            found = self._generate(groups, call, ending)
        self._held[step] = groups
        return ending.goes_on(found), _metrics(groups, self._num_delivered, num_begun), self._client.take_use()

    def held(self, step: int) -> list[OpenGroup]:
        """Return the groups that are held after a training step."""
        return self._held.get(step, [])

    def hold(self, step: int, groups: Sequence[OpenGroup]) -> None:
        """Hold these groups after a training step instead of what was held then."""
        self._held = {step: list(groups)}

    def load(self, step: int, folder: Path, rank: int, num_ranks: int) -> None:
        """Hold after a training step what the checkpoint in this folder holds (`load_held`)."""
        self.hold(step, load_held(folder, rank, num_ranks, OpenGroup.of_json, has_agents=False))

    def _begin(self, task: RolloutTask, call: RolloutCall) -> OpenGroup:
        requests = {request.id: request for request in self._requests(task, call)}
        return OpenGroup(task.row, call.group(task), call.state.global_step, requests, expected=task.expected)

    # ------------------------------------------------------------------------------------------------ generation

    def _generate(self, groups: Sequence[OpenGroup], call: RolloutCall, ending: Ending) -> list[Standing]:
        """Run what is unfinished until all ranks end, and break the rest off. Returns how far all ranks were then."""
        of = {request: group for group in groups for request in group.requests}
        requests = in_order(groups)
        progress.count(len(requests), "samples")
        handle: Handle | None = None

        def begin() -> Standing:
            nonlocal handle
            for group in groups:
                if group.is_whole:  # it was read from a checkpoint, its rewards failed, or the functions are others
                    group.forget_failure()
                    self._score(group, call)
            handle = self._client.submit(requests, call.version)
            return ending.standing(groups)

        def go_on() -> Standing:
            assert handle is not None
            for _ in range(ending.rule.check_steps):
                if handle.is_done and not self._client.is_shared:
                    break
                self._client.advance(idle_seconds=0.0, can_interrupt=False)
                self._take(handle.take(), of, call)
            return ending.standing(groups)

        def break_off() -> None:
            assert handle is not None
            self._client.cancel(handle)
            self._take(handle.take(), of, call)
            is_first = True  # ranks that share an engine take the same number of steps
            while (is_first or self._client.is_busy) if self._client.is_shared else not handle.is_done:
                self._client.advance(idle_seconds=0.0, can_interrupt=False)
                self._take(handle.take(), of, call)
                is_first = False

        found = self._agreed(begin)
        while not ending.is_reached(found):
            found = self._agreed(go_on)
        self._agreed(break_off)
        return found

    def _take(self, events: Sequence[FinishedSample], of: Mapping[int, OpenGroup], call: RolloutCall) -> None:
        """Take samples that have finished, and have their groups scored once they are whole."""
        progress.advance(sum(event.finish_reason != "abort" for event in events))
        for event in events:
            group = of[event.id]
            group.take(event)
            if group.is_whole:
                group.whole_in = call.state
                self._score(group, call)

    def _score(self, group: OpenGroup, call: RolloutCall) -> None:
        if self._rewards is None or not call.is_scored or group.is_scored:
            return
        inputs = [
            reward_input(sample, group.row, text, group.group, self._decode)
            for sample, text in zip(group.samples, self._texts(group), strict=True)
        ]
        group.scoring = self._rewards.submit(inputs, group.whole_in)

    def _texts(self, group: OpenGroup) -> list[str]:
        """Return the texts of a whole group, which are decoded once."""
        if group.texts is None:
            group.texts = [self._decode(sample.completion_ids) for sample in group.samples]
        return group.texts

    def _delivered(
        self, groups: Sequence[OpenGroup], timings: Timings, call: RolloutCall
    ) -> tuple[Batch, RolloutReport]:
        """Return the scored samples of these groups."""
        samples = [sample for group in groups for sample in group.samples]
        rows = [group.row for group in groups for _ in group.requests]
        ids = [group.group for group in groups for _ in group.requests]
        columns = columns_of(rows, ids, samples, call.params.temperature)
        columns["completion"] = [text for group in groups for text in self._texts(group)]
        texts = columns["completion"]
        inputs = [reward_input(*of, self._decode) for of in zip(samples, rows, texts, ids, strict=True)]
        for group in groups:
            self._score(group, call)
        futures = [group.scoring for group in groups if group.scoring is not None]
        return self._rewarded(columns, inputs, futures, timings, call)

    def _agreed(self, action: Callable[[], Any]) -> list[Any]:
        return agreed(action, self._timed_gather, self._client)

    def _timed_gather(self, value: Any) -> list[Any]:
        start = time.perf_counter()
        found = self._gather(value)
        self._waited_seconds += time.perf_counter() - start
        return found


def agreed(action: Callable[[], Any], gather: Gather, client: EngineClient | None = None) -> list[Any]:
    """Run an action on every rank and return the results of all. If it raises on one, it raises on all, a
    KeyboardInterrupt as such. client: of an engine that the action steps.

    Raises PeerFailedError if another rank failed.
    """
    result, failure = None, None
    try:
        result = action()
    except BaseException as error:
        if client is not None and client.is_shared:
            raise  # the others may wait for this rank's next step; their engine tells them
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = gather((result, told, isinstance(failure, KeyboardInterrupt)))
    if failure is not None:
        raise failure
    if any(is_interrupt for _, _, is_interrupt in outcomes):
        raise KeyboardInterrupt
    for rank, (_, theirs, _) in enumerate(outcomes):
        if theirs is not None:
            raise PeerFailedError(f"rank {rank} failed in its rollout: {theirs}")
    return [found for found, _, _ in outcomes]


def _metrics(left: Sequence[OpenGroup], num_delivered: int, num_begun: int, *, drops: bool = False) -> MetricSums:
    """Return what this rank does not deliver, which it holds or drops, beside so many tokens that it delivered.
    num_begun: tokens of completions that were broken off before. How old the tokens of a step are is counted by the
    update (staleness/...)."""
    found, what = MetricSums(), "dropped" if drops else "held"
    num_left = sum(group.num_tokens for group in left)
    found.total(f"buffer/{what}_groups", len(left))
    found.total(f"buffer/{what}_tokens", num_left)
    if not drops:
        found.mean("buffer/held_share", num_left, num_left + num_delivered)
        found.total("buffer/continued_tokens", num_begun)
    return found
