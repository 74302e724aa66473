"""Agents in partial rollouts: trajectories that are not finished at the end of a step stay alive until the next one.

Coroutines, tools and environments of a trajectory go on where they are; only what the engine was generating is broken
off, and asked for again under the new weights. Nothing but its prompt can be kept of a trajectory once its coroutine is
gone: a resumed run, and a step that was taken back, begin it again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.batch import Batch
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SlotUse
from hybrid_rl.engines.client import EngineClient
from hybrid_rl.metrics import MetricSums, Timings
from hybrid_rl.process import progress
from hybrid_rl.process.interrupts import interrupt_requested
from hybrid_rl.rewards import RewardRunner
from hybrid_rl.rollout.agent_columns import agent_metrics, engine_metrics
from hybrid_rl.rollout.agentic import AgentRollout
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.ending import Ending
from hybrid_rl.rollout.episodes import Episodes, Room
from hybrid_rl.rollout.held import HeldPrompt, HoldRule, Standing, check_tokens, load_held
from hybrid_rl.rollout.held_json import read_fields
from hybrid_rl.rollout.held_turns import HeldTurns
from hybrid_rl.rollout.partial import Gather, agreed
from hybrid_rl.rollout.scored import POLL_SECONDS, RolloutReport

logger = logging.getLogger("hybrid_rl")


@dataclass(eq=False)
class AgentGroup:
    """The trajectories of one prompt. call: the rollout that began them. episodes, running: while they are alive;
    is_whole: whether all had ended when `look` was called last."""

    task: RolloutTask
    call: RolloutCall
    episodes: Episodes | None = None
    running: Future[None] | None = None
    is_whole: bool = False

    @property
    def group(self) -> int:
        """Its id."""
        return self.call.group(self.task)

    @property
    def row(self) -> PromptRow:
        """Its prompt."""
        return self.task.row

    @property
    def born(self) -> int:
        """The training step that began it first."""
        return self.call.state.global_step

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that made its oldest token; None if it has none."""
        asked = [] if self.episodes is None else self.episodes.asked
        return min((tokens.oldest_version for tokens in asked if tokens.oldest_version is not None), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens of the policy in answers that are complete."""
        attempts = [] if self.episodes is None else self.episodes.attempts
        return sum(sum(sample.mask) for attempt in attempts for sample in attempt.trajectory.samples)

    def prompt(self, data_rank: int) -> HeldPrompt:
        """Return what the driver knows of it. data_rank: which of the ranks that have samples of their own holds it."""
        call = self.call
        return HeldPrompt(self.row, call.num_generations, call.params.temperature, self.oldest_version, data_rank)

    def look(self) -> None:
        """Note whether it is whole. Raises what ended its coroutines."""
        if self.episodes is not None and self.running is not None:
            if self.running.done():
                self.running.result()
            self.is_whole = self.episodes.is_made

    def end(self) -> None:
        """Forget its trajectories, which have ended."""
        self.episodes, self.running, self.is_whole = None, None, False

    def to_json(self) -> dict[str, Any]:
        """Return what it takes to begin it again, in what JSON can hold exactly."""
        call = {name: value for name, value in dataclasses.asdict(self.call).items() if name != "hold"}
        return {"place": self.task.place, "row": dataclasses.asdict(self.row), "call": call}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> AgentGroup:
        """Make the group that `to_json` described. Raises CheckpointError, with a key, for anything else."""
        kept = read_fields(_Kept, found, "")
        check_tokens(kept.row.prompt_ids, "row.prompt_ids")
        return cls(RolloutTask(kept.place, kept.row), kept.call)


@dataclass(frozen=True)
class _Kept:
    """What `AgentGroup.to_json` gives."""

    place: int
    row: PromptRow
    call: RolloutCall


class HeldAgentRollout(AgentRollout):
    """Makes the samples of training steps from trajectories that may have been begun in earlier ones. Rollouts without
    a HoldRule (evaluation, generate) run to their end, in what room the held trajectories leave.

    gather: the values of all ranks, by rank. The other arguments are those of AgentRollout.
    """

    def __init__(self, client: EngineClient, *arguments: Any, gather: Gather, **named: Any) -> None:
        self._held: dict[int, list[AgentGroup]] = {}  # by the step after which they are held
        self._alive_after: int | None = None  # the step after which trajectories that are alive are held
        self._held_turns, self._room = HeldTurns(client), Room(1)
        self._before = client.stats()  # when the present step began
        self._is_told = False
        super().__init__(client, *arguments, **named)
        self._gather = gather

    def score_with(self, rewards: RewardRunner | None) -> None:
        """Score with these functions from now on. What is held begins again: environments of what was scored have
        served others since."""
        super().score_with(rewards)
        self._release()

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return the samples of the groups of this step that this rank has made. Collective over all ranks if some are
        held. Raises KeyboardInterrupt on all ranks if an interrupt was requested on one.

        After an error nothing is alive: what was held begins again.
        """
        if call.hold is None:
            rewards, left = self._rewards if call.is_scored else None, self._max_environments
            needs_group = rewards is not None and rewards.reads_environments and rewards.score_by == "group"
            if left is not None and left < (call.num_generations if needs_group else 1):
                self._release()  # else these would wait for environments of what waits for the next step
            return super().run(tasks, call)
        try:
            return self._run_held(tasks, call, call.hold)
        except BaseException:
            self._release()
            raise

    def go_ahead(
        self, tasks: Sequence[RolloutTask], call: RolloutCall, learner: int, is_outdated: Callable[[], bool]
    ) -> tuple[bool, MetricSums, SlotUse]:
        """Do as `PartialRollout.go_ahead`: begin these prompts, and go on with what the step in `call` has left, until
        the next step has its batch. Tools and environments go on after that. After an error nothing is alive."""
        step, turns, metrics = call.state.global_step, self._held_turns, MetricSums()
        assert call.hold is not None, "nothing else has a next step"
        ending = Ending(call.hold, learner, is_outdated)
        try:
            held, _ = self._taken_up(step)  # `run` has left them alive
            groups = self._held[step] = held + self._made(tasks, call)
            self._client.take_use()
            with self._client.session(), turns.rollout(call.version):
                metrics.total("buffer/continued_tokens", turns.num_begun)
                found = self._generate(groups, call, ending)
        except BaseException:
            self._release()
            raise
        metrics.total("buffer/held_groups", len(groups))
        metrics.total("buffer/held_tokens", turns.num_begun + sum(group.num_tokens for group in groups))
        metrics.merge(self._engine_metrics())
        return ending.goes_on(found), metrics, SlotUse(self._client.take_use().num_steps)

    @property
    def _max_open(self) -> int:
        return max(1, self._settings.max_open - self._room.num_open)

    @property
    def _max_environments(self) -> int | None:
        limit = super()._max_environments
        return None if limit is None else limit - self._room.num_rented

    def held(self, step: int) -> list[AgentGroup]:
        """Return the groups that are held after a training step."""
        return self._held.get(step, [])

    def hold(self, step: int, groups: Sequence[AgentGroup]) -> None:
        """Hold these groups after a training step instead of what was held then; they begin again."""
        self._release()
        self._held = {step: list(groups)}

    def load(self, step: int, folder: Path, rank: int, num_ranks: int) -> None:
        """Hold after a training step what the checkpoint in this folder holds (`load_held`)."""
        self.hold(step, load_held(folder, rank, num_ranks, AgentGroup.of_json, has_agents=True))

    def close(self) -> None:
        """Cancel what is held, then close the agent and the event loops; idempotent."""
        self._release()
        super().close()

    def _release(self) -> None:
        """Cancel everything that is alive. Environments are given back."""
        self._held_turns.release()
        self._alive_after = None
        for group in (group for groups in self._held.values() for group in groups):
            group.end()

    # ------------------------------------------------------------------------------------------------------- steps

    def _run_held(self, tasks: Sequence[RolloutTask], call: RolloutCall, rule: HoldRule) -> tuple[Batch, RolloutReport]:
        step, timings, turns, metrics = call.state.global_step, Timings(), self._held_turns, MetricSums()
        self._before = self._client.stats()
        groups, num_again = self._taken_up(step - 1)
        metrics.total("buffer/restarted_trajectories", num_again)
        self._room.most_open = self._room.num_open
        groups += self._made(tasks, call)
        self._client.take_use()
        with self._client.session():
            with timings.measure("rollout"), turns.rollout(call.version):
                if not rule.drops:
                    metrics.total("buffer/continued_tokens", turns.num_begun)
                self._generate(groups, call, Ending(rule, call.version))
            use = SlotUse(self._client.take_use().num_steps)  # slots are empty while tools work
            keys = [rule.key(group, call.version) for group in groups if group.is_whole]
            everywhere = self._agreed(lambda: (keys, rule.standing(groups, call.version)))
            all_keys = [key for of_rank, _ in everywhere for key in of_rank]
            taken = rule.chosen(all_keys, [standing for _, standing in everywhere], call.version)
            mine = [group for group in groups if group.group in taken]
            left = [group for group in groups if group.group not in taken]
            what = "dropped" if rule.drops else "held"
            metrics.total(f"buffer/{what}_groups", len(left))
            metrics.total(f"buffer/{what}_tokens", turns.num_begun + sum(group.num_tokens for group in left))
            made = [group.episodes for group in mine if group.episodes is not None]
            with timings.measure("reward"), progress.doing("rewards"):
                _wait([group.running for group in mine if group.running is not None])
            attempts = [attempt for episodes in made for attempt in episodes.attempts]
            batch, report = self._delivered(made, call, timings, agent_metrics(attempts))
        report.metrics.merge(self._engine_metrics())
        report.metrics.merge(metrics)
        report.use = use
        for group in mine:
            group.end()
        self._held = {at: held for at, held in self._held.items() if at >= step - 1} | {step: left}
        self._alive_after = step
        if rule.drops:  # so nothing is alive that the next step needs
            self._release()
            self._held[step] = []
        return batch, report

    def _made(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> list[AgentGroup]:
        """Return the groups of these prompts, whose trajectories have not begun."""
        born = dataclasses.replace(call, hold=None)
        return [AgentGroup(task, born) for task in tasks]

    def _engine_metrics(self) -> MetricSums:
        return engine_metrics(self._before, self._client.stats(), self._room.most_open)

    def _taken_up(self, step: int) -> tuple[list[AgentGroup], int]:
        """Return what is held after a step, and how many of its trajectories begin again."""
        if self._alive_after != step:
            self._release()
        if self._alive_after is None:
            self._room = Room(self._settings.max_open, super()._max_environments)
        held = self.held(step)
        again = sum(group.call.num_generations for group in held if group.episodes is None)
        if again and not self._is_told:
            self._is_told = True
            logger.warning(
                "trajectories that were held between steps begin again from their prompts (%d now; "
                "buffer/restarted_trajectories counts them): what they were doing is gone after a resume, an interrupt "
                "or an error, and when other reward functions are set",
                again,
            )
        return [AgentGroup(one.task, one.call) if one.episodes is None else one for one in held], again

    def _generate(self, groups: Sequence[AgentGroup], call: RolloutCall, ending: Ending) -> list[Standing]:
        """Let trajectories go on until all ranks end, and break off what the engine makes. Returns how far all ranks
        were then."""
        turns = self._held_turns

        def num_ended() -> int:
            return sum(len(group.episodes.inputs) for group in groups if group.episodes is not None)

        num_told = num_ended()
        progress.count(sum(group.call.num_generations for group in groups) - num_told, "trajectories")

        def begin() -> Standing:
            for group in groups:
                self._begun(group).state = call.state
            turns.settle()
            return standing()

        def go_on() -> None:
            for _ in range(ending.rule.check_steps):
                turns.step()
                if turns.is_idle and not self._client.is_shared:
                    break

        def standing() -> Standing:
            nonlocal num_told
            before, num_told = num_told, num_ended()
            progress.advance(num_told - before)
            turns.check()
            for group in groups:
                group.look()
            return ending.standing(groups)

        found = self._agreed(begin)
        while not ending.is_reached(found):
            found = self._agreed(standing, go_on)
        self._agreed(standing, turns.suspend)
        return found

    def _begun(self, group: AgentGroup) -> Episodes:
        """Return the trajectories of a group, which are begun unless they are alive."""
        if group.episodes is None:
            options: Any = {"max_submissions": 1, "advance": lambda: None}
            group.episodes = self._episodes([group.task], group.call, self._held_turns, self._room, **options)
            group.running = self._held_turns.start(group.episodes.run)
        return group.episodes

    def _agreed(self, action: Callable[[], Any], steps: Callable[[], None] | None = None) -> list[Any]:
        """Return what an action gives on every rank. steps: of the engine, before it."""

        def both() -> Any:
            if steps is not None:
                steps()
            return action()

        if not self._client.is_shared:
            return agreed(both, self._gather)
        if steps is not None:
            steps()  # only the engine fails in them; `action` tells what else did, after the same number of steps
        return agreed(action, self._gather)


def _wait(running: Sequence[Future[None]]) -> None:
    """Wait until groups are scored. A reward may take long: an interrupt is seen meanwhile."""
    waiting = set(running)
    while waiting:
        if interrupt_requested():
            raise KeyboardInterrupt
        _, waiting = wait(waiting, timeout=POLL_SECONDS)
    for future in running:
        future.result()
