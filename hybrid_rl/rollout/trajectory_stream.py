"""The stream of groups whose samples are trajectories: an agent makes each, turn by turn."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from hybrid_rl.agents.client import Limits
from hybrid_rl.agents.turn_record import row_digest
from hybrid_rl.batch import Batch
from hybrid_rl.config import TrainerConfig
from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SlotUse
from hybrid_rl.engines.engine_client import EngineClient
from hybrid_rl.errors import ConfigError
from hybrid_rl.metrics.metric_sums import MetricSums, Timings, now
from hybrid_rl.process import progress
from hybrid_rl.rewards import RewardRunner
from hybrid_rl.rollout.agent_columns import (
    AGENT,
    Attempt,
    agent_metrics,
    as_written,
    engine_metrics,
    has_own_reward,
    has_turn_reward,
    own_rewards,
    sample_inputs,
    trajectory_columns,
)
from hybrid_rl.rollout.call import RolloutCall, RolloutReport, RolloutTask
from hybrid_rl.rollout.episodes import Episodes, EpisodeSettings, Room
from hybrid_rl.rollout.held_files import check_tokens
from hybrid_rl.rollout.held_json import read_fields
from hybrid_rl.rollout.hold_rule import HeldPrompt, HoldRule
from hybrid_rl.rollout.sample_columns import first_in_full
from hybrid_rl.rollout.stream import GroupStream, awaited
from hybrid_rl.rollout.turns import EngineTurns

logger = logging.getLogger("hybrid_rl")


@dataclass(eq=False)
class TrajectoryGroup:
    """The trajectories of one prompt, of which checkpoints keep the arguments: what it takes to begin them again.
    place, call: of the prompt, in the rollout that began them. episodes, running: while they are alive; is_whole:
    whether all had ended when `look` was called last."""

    has_agents: ClassVar = True

    place: int
    row: PromptRow
    call: RolloutCall
    episodes: Episodes | None = field(init=False, default=None)
    running: Future[None] | None = field(init=False, default=None)
    is_whole: bool = field(init=False, default=False)

    @property
    def task(self) -> RolloutTask:
        """Its prompt, as the rollout was given it."""
        return RolloutTask(self.place, self.row)

    @property
    def group(self) -> int:
        """Its id."""
        return self.call.group(self.task)

    @property
    def born(self) -> int:
        """The training step that began it first."""
        return self.call.state.global_step

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that made its oldest token, of what it has finished in earlier lives too; None if
        it has none."""
        if self.episodes is None:
            return None
        versions = [tokens.oldest_version for tokens in self.episodes.asked]
        versions += [attempt.record.oldest_version for attempt in self.episodes.attempts]
        return min((version for version in versions if version is not None), default=None)

    @property
    def num_missing(self) -> int:
        """Tokens that may be expected to be generated for it yet: nobody knows what agents will ask."""
        return 0

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

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> TrajectoryGroup:
        """Make the group that a checkpoint has. Raises CheckpointError, with a key, for anything else."""
        group = read_fields(cls, fields, "")
        check_tokens(group.row.prompt_ids, "row.prompt_ids")
        return group


class TrajectoryStream(GroupStream[TrajectoryGroup]):
    """Makes groups of trajectories, each of which an agent makes. Without a rule they run to their end, in what room
    the held ones leave, and nothing of them outlives the call.

    With a rule, coroutines, tools and environments of a trajectory that is held go on where they are; only what the
    engine was generating is broken off, and asked for again under the new weights. Once the coroutine of a trajectory
    is gone, it is made again, from the turns and calls that it had finished: in a resumed run, in a step that was taken
    back, and after an error everything that is held.

    options: the other arguments of GroupStream. Raises ConfigError for a judge without `encode`.
    """

    group_type = TrajectoryGroup

    def __init__(
        self,
        client: EngineClient,
        rewards: RewardRunner | None,
        settings: EpisodeSettings,
        **options: Any,
    ) -> None:
        self._turns, self._held_turns, self._settings = EngineTurns(client), EngineTurns(client), settings
        self._alive_after: int | None = None  # the step after which trajectories that are alive are held
        self._room, self._before = Room(1), client.stats()  # of held trajectories; when the present step began
        self._num_ended = self._num_again = 0  # trajectories of the present call; those that it begins once more
        self._is_closed = self._has_warned = False
        super().__init__(client, rewards, settings.chat.decode, seed=settings.seed, **options)

    def score_with(self, rewards: RewardRunner | None) -> None:
        """Score with these functions from now on. What is held begins again: environments of what was scored have
        served others since."""
        super().score_with(rewards)
        self._release()

    def reconfigure(self, config: TrainerConfig) -> None:
        """Tell an agent that has to know it (`sample_at`) of another temperature; others follow the call. Turns that
        were made otherwise are not used again."""
        self._settings.record.reconfigure(config)
        sample_at = getattr(self._settings.agent, "sample_at", None)
        if sample_at is not None:
            sample_at(config.rollout.temperature)

    def close(self) -> None:
        """Cancel what is held, close the agent, if it has a method for that, and end the event loops that agents run
        on; idempotent."""
        self._release()
        close = getattr(self._settings.agent, "close", None)
        if close is not None and not self._is_closed:
            close()
        self._is_closed = True
        self._turns.release()
        self._settings.record.close()

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return samples as `GroupStream.run` says."""
        if call.hold is not None:
            return self._run_held(tasks, call, call.hold)
        if call.is_training:
            self._settings.record.forget({call.state.global_step})
            self._settings.record.void(call.num_voids)
        rewards, limit = self._rewards if call.is_scored else None, self._num_free_environments
        needs_group = rewards is not None and rewards.reads_environments and rewards.score_by == "group"
        if limit is not None and limit < (call.num_generations if needs_group else 1):
            self._release()  # else these would wait for environments of what waits for the next step
        timings = Timings()
        room = Room(max(1, self._settings.max_open - self._room.num_open), self._num_free_environments)
        before = self._client.stats()
        self._client.take_use()
        with self._client.session():
            episodes = self._episodes(tasks, call, self._turns, room)
            start = now()
            progress.count(len(episodes.attempts), "trajectories")
            self._turns.run(episodes.run, call.version)
            timings.add("rollout", episodes.made_at - start)
            timings.add("reward", now() - episodes.made_at)
            metrics = agent_metrics(episodes.attempts)
            metrics.merge(engine_metrics(before, self._client.stats(), room.most_open))
            use = self._use()
            batch, report = self._scored([episodes], call, timings)
        report.use, report.metrics = use, metrics
        return batch, report

    @property
    def _num_free_environments(self) -> int | None:
        """Environments that trajectories beside the held ones may have at once; None = any number."""
        limit = self._settings.config.max_environments
        return None if limit is None else limit - self._room.num_rented

    def _episodes(
        self, tasks: Sequence[RolloutTask], call: RolloutCall, turns: EngineTurns, room: Room, **options: Any
    ) -> Episodes:
        """Return the trajectories of these prompts, none of which has begun."""
        record, step = self._settings.record, call.state.global_step if call.is_training else None
        # Evaluations and calls of `generate` may have one purpose and places; their ids are never the same.
        where = call.purpose if call.is_training else f"{call.purpose}/{call.first_id}"
        attempts = list[Attempt]()
        for task in tasks:
            row = row_digest([task.row.prompt if task.row.has_prompt else None, task.row.columns])
            names = (f"{where}/{task.place}-{row}/{number}" for number in range(call.num_generations))
            attempts += (Attempt.begun(task, number, call, record.of(name, step)) for number, name in enumerate(names))
        rewards, limits = self._rewards if call.is_scored else None, limits_of(self._settings.limits, tasks, call)
        return Episodes(self._settings, turns, attempts, call, rewards, limits, room, call.state, **options)

    # ------------------------------------------------------------------------------------------ groups of a rule

    def _run_step(self, tasks: Sequence[RolloutTask], call: RolloutCall, rule: HoldRule) -> tuple[Batch, RolloutReport]:
        self._settings.record.void(call.num_voids)
        self._before, self._room.most_open = self._client.stats(), self._room.num_open
        batch, report = super()._run_step(tasks, call, rule)
        report.metrics.total("buffer/restarted_trajectories", self._num_again)
        self._alive_after = None if rule.drops else call.state.global_step
        return batch, report

    def _going_on(self, step: int) -> list[TrajectoryGroup]:
        if self._alive_after != step:
            self._release()
        if self._alive_after is None:
            self._room = Room(self._settings.max_open, self._settings.config.max_environments)
        held = self.held(step)
        self._settings.record.forget({group.born for group in held} | {step, step + 1})
        self._num_again = num_again = sum(group.call.num_generations for group in held if group.episodes is None)
        if num_again and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "trajectories that were held between steps are made again, from the turns that they had finished (%d "
                "now; buffer/restarted_trajectories counts them): what they were doing is gone after a resume, an "
                "interrupt or an error, and when other reward functions are set",
                num_again,
            )
        return [group if group.episodes else TrajectoryGroup(group.place, group.row, group.call) for group in held]

    def _begin(self, task: RolloutTask, call: RolloutCall) -> TrajectoryGroup:
        return TrajectoryGroup(task.place, task.row, replace(call, hold=None))

    def _start(self, groups: Sequence[TrajectoryGroup], call: RolloutCall) -> None:
        self._held_turns.begin(call.version)
        num_samples = sum(group.call.num_generations for group in groups)
        self._num_ended = _num_ended(groups)
        progress.count(num_samples - self._num_ended, "trajectories")
        for group in groups:
            if group.episodes is None:
                group.episodes = self._episodes(
                    [group.task], group.call, self._held_turns, self._room, max_submissions=1, advance=lambda: None
                )
                group.running = self._held_turns.start(group.episodes.run)
            group.episodes.state = call.state
        self._held_turns.settle()
        self._look(groups, call)

    def _go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._held_turns.step()
            if self._held_turns.is_idle and not self._client.is_shared:
                break

    def _look(self, groups: Sequence[TrajectoryGroup], call: RolloutCall) -> None:
        before, self._num_ended = self._num_ended, _num_ended(groups)
        progress.advance(self._num_ended - before)
        self._held_turns.check()
        for group in groups:
            group.look()

    def _break_off(self) -> None:
        self._held_turns.suspend()

    def _taken(
        self, groups: Sequence[TrajectoryGroup], timings: Timings, call: RolloutCall
    ) -> tuple[Batch, RolloutReport]:
        with timings.measure("reward"), progress.doing("rewards"):
            awaited(group.running for group in groups if group.running is not None)
        made = [group.episodes for group in groups if group.episodes is not None]
        batch, report = self._scored(made, call, timings)
        report.metrics = agent_metrics([attempt for episodes in made for attempt in episodes.attempts])
        for group in groups:
            group.end()
        return batch, report

    def _engine_metrics(self) -> MetricSums:
        return engine_metrics(self._before, self._client.stats(), self._room.most_open)

    def _num_begun(self, groups: Sequence[TrajectoryGroup]) -> int:
        return self._held_turns.num_begun

    def _use(self) -> SlotUse:
        return SlotUse(self._client.take_use().num_steps)  # slots are empty while tools work

    def _release(self) -> None:
        """Cancel everything that is alive. Environments are given back."""
        self._held_turns.release()
        self._alive_after = None
        for group in (group for groups in self._held.values() for group in groups):
            group.end()

    # ---------------------------------------------------------------------------------------------------- rewards

    def _scored(self, made: Sequence[Episodes], call: RolloutCall, timings: Timings) -> tuple[Batch, RolloutReport]:
        """Return the samples of trajectories that have ended and been scored."""
        attempts = [attempt for episodes in made for attempt in episodes.attempts]
        columns = trajectory_columns(attempts, call, self._decode, self._client.experts_shape)
        failed = [failure for attempt in attempts if (failure := attempt.reward_failure()) is not None]
        rewards = self._rewards if call.is_scored else None
        if rewards is None:
            return Batch(columns), RolloutReport(timings.seconds, first_in_full(failed))
        problem = self._settings.turn_rewards_problem
        if problem and any(has_turn_reward(attempt.trajectory) for attempt in attempts):
            raise ConfigError(
                "an agent or rollout_func gave a reward to a turn (add_reward(value, turn)), which "
                f"{problem}; or give it to the trajectory: add_reward(value)"
            )
        inputs = sample_inputs(attempts, {key: value for episodes in made for key, value in episodes.inputs.items()})
        parts = [part for episodes in made for part in episodes.parts]
        own = [place for place, source in rewards.entries.given.items() if source.name == AGENT]
        if own:
            parts += ((own[0], part) for part in own_rewards(attempts, inputs))
        elif any(has_own_reward(attempt.trajectory) for attempt in attempts):
            raise ConfigError(f"an agent gave rewards, but GivenReward({AGENT!r}) is not among the reward functions")
        columns["extra"] = [
            {name: as_written(value) for name, value in attempt.trajectory.extra.items() if key == attempt.keys[-1]}
            for attempt in attempts
            for key in attempt.keys
        ]
        return self._rewarded(columns, rewards.join(inputs, parts, failed), timings, call)


def _num_ended(groups: Sequence[TrajectoryGroup]) -> int:
    return sum(len(group.episodes.inputs) for group in groups if group.episodes is not None)


def limits_of(limits: Limits, tasks: Sequence[RolloutTask], call: RolloutCall) -> Limits:
    """Return the limits of a call, which may have longer prompts and ask for longer completions than training does."""
    longest = max((len(task.row.prompt_ids) for task in tasks), default=0)
    longer_prompt = 0 if limits.max_prompt_length is None else max(0, longest - limits.max_prompt_length)
    longer = longer_prompt + max(0, call.params.max_tokens - limits.max_completion_length)
    return replace(
        limits,
        max_completion_length=call.params.max_tokens,
        max_length=limits.max_length + longer,
        max_prompt_length=None if limits.max_prompt_length is None else limits.max_prompt_length + longer_prompt,
    )
