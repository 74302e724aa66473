"""A worker's share of a rollout of agents: each trajectory goes on by itself, and is scored when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybrid_rl.agents.client import ChatFormat, Limits
from hybrid_rl.agents.episode import Agent
from hybrid_rl.agents.floor import RolloutFunction, check_rollout_func
from hybrid_rl.agents.http_agent import HttpAgent
from hybrid_rl.batch import Batch
from hybrid_rl.config.agent_keys import AgentConfig
from hybrid_rl.engines.base import SlotUse
from hybrid_rl.engines.client import EngineClient
from hybrid_rl.errors import ConfigError
from hybrid_rl.metrics import MetricSums, Timings, now
from hybrid_rl.process import progress
from hybrid_rl.rewards import RewardFailure, RewardRunner
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
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.episodes import Episodes, EpisodeSettings, Room
from hybrid_rl.rollout.judged import Encode, JudgeRound
from hybrid_rl.rollout.late import merge_late
from hybrid_rl.rollout.scored import RolloutReport, first_in_full, logged_means, reward_columns
from hybrid_rl.rollout.turns import EngineTurns

OPEN_PER_PLACE = 2  # trajectories under way for each that the engine runs at once: so many may wait for tools


class AgentRollout:
    """Makes scored samples of trajectories, each of which an agent makes.

    agent: makes one trajectory; rollout_func: all of them, instead of an agent. limits: of a trajectory; its length is
    that of the call. max_running: sequences that the engine runs at once. tokenizer: offered to rollout_func.
    turn_rewards_problem: why turns may have no rewards of their own ("" = they may), which `run` raises as ConfigError.
    The other arguments are those of ScoredRollout.

    Raises ConfigError for a judge without `encode`, for a rollout_func that is not `async def`, and for neither or both
    of agent and rollout_func.
    """

    def __init__(
        self,
        client: EngineClient,
        rewards: RewardRunner | None,
        chat: ChatFormat,
        agent: Agent | None,
        limits: Limits,
        *,
        seed: int,
        config: AgentConfig,
        max_running: int,
        rollout_func: RolloutFunction | None = None,
        encode: Encode | None = None,
        max_length: int | None = None,
        tokenizer: Any = None,
        turn_rewards_problem: str = "",
    ) -> None:
        self._turn_rewards_problem = turn_rewards_problem
        self._client, self._chat, self._agent = client, chat, agent
        self._limits, self._encode, self._seed, self._max_length = limits, encode, seed, max_length
        self._turns = EngineTurns(client)
        self._settings = EpisodeSettings(
            turns=self._turns,
            chat=chat,
            agent=agent,
            rollout_func=rollout_func,
            config=config,
            seed=seed,
            max_open=config.max_open_trajectories or OPEN_PER_PLACE * max_running,
            tokenizer=tokenizer,
        )
        if (agent is None) == (rollout_func is None):
            raise ConfigError("a rollout of agents takes either an agent or a rollout_func")
        if rollout_func is not None:
            check_rollout_func(rollout_func)
        self._is_closed = False
        self.score_with(rewards)

    def score_with(self, rewards: RewardRunner | None) -> None:
        """Score with these functions from now on."""
        self._rewards = rewards
        self._judges: JudgeRound | None = None
        if rewards is not None and rewards.entries.judges:
            if self._encode is None:
                raise ConfigError("an EngineJudge needs the policy's tokenizer: pass encode= to AgentRollout")
            limits: Any = {"seed": self._seed, "max_length": self._max_length}
            self._judges = JudgeRound(self._client, rewards, self._chat.decode, self._encode, **limits)

    def sample_at(self, temperature: float) -> None:
        """Let agents that ask over HTTP get answers at this temperature from now on; others follow the call."""
        if isinstance(self._agent, HttpAgent):
            self._agent.sample_at(temperature)

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return the samples of num_generations trajectories for each of these prompts, prompt by prompt. Raises
        KeyboardInterrupt if an interrupt was requested."""
        timings, room = Timings(), Room(self._max_open, self._max_environments)
        before = self._client.stats()
        self._client.take_use()
        with self._client.session():
            episodes = self._episodes(tasks, call, self._turns, room)
            start = now()
            progress.count(len(episodes.attempts), "trajectories")
            self._turns.run(episodes.run, call.version)
            end = now()
            timings.add("rollout", episodes.made_at - start)
            timings.add("reward", end - episodes.made_at)
            agents = agent_metrics(episodes.attempts)
            agents.merge(engine_metrics(before, self._client.stats(), room.most_open))
            use = SlotUse(self._client.take_use().num_steps)  # slots are empty while tools work
            batch, report = self._delivered([episodes], call, timings, agents)
        return batch, replace(report, use=use)

    @property
    def _max_open(self) -> int:
        """Trajectories that may be under way at once."""
        return self._settings.max_open

    @property
    def _max_environments(self) -> int | None:
        """Environments that trajectories may have at once."""
        return self._settings.config.max_environments

    def _episodes(
        self, tasks: Sequence[RolloutTask], call: RolloutCall, turns: EngineTurns, room: Room, **options: Any
    ) -> Episodes:
        """Return the trajectories of these prompts, none of which has begun."""
        attempts = [Attempt.begun(task, number, call) for task in tasks for number in range(call.num_generations)]
        rewards, limits = self._rewards if call.is_scored else None, limits_of(self._limits, tasks, call)
        settings = replace(self._settings, turns=turns)
        return Episodes(settings, attempts, call, rewards, limits, room, call.state, **options)

    def _delivered(
        self, made: Sequence[Episodes], call: RolloutCall, timings: Timings, agents: MetricSums
    ) -> tuple[Batch, RolloutReport]:
        """Return the samples of trajectories that have ended and been scored. agents: their metrics."""
        attempts = [attempt for episodes in made for attempt in episodes.attempts]
        rewards = self._rewards if call.is_scored else None
        columns = trajectory_columns(attempts, call, self._chat.decode)
        failed = [failure for attempt in attempts if (failure := attempt.reward_failure()) is not None]
        if rewards is None:
            return Batch(columns), RolloutReport(timings.seconds, first_in_full(failed), metrics=agents)
        batch, report = self._scored(columns, attempts, failed, made, rewards)
        report.seconds, report.metrics = timings.seconds, agents
        if self._judges is not None:
            with timings.measure("judge"):
                late = self._judges.run(batch, call, report.failures)
            report.logged.merge(late.logged)
            batch, report.failures = merge_late(batch, report.failures, rewards, late)
        return batch, report

    def _scored(
        self,
        columns: dict[str, Any],
        attempts: Sequence[Attempt],
        failed: Sequence[RewardFailure],
        all_episodes: Sequence[Episodes],
        rewards: RewardRunner,
    ) -> tuple[Batch, RolloutReport]:
        """Join rewards of functions with those that agents gave. failed: of agents."""
        inputs = sample_inputs(
            attempts, {key: one for episodes in all_episodes for key, one in episodes.inputs.items()}
        )
        parts = [part for episodes in all_episodes for part in episodes.parts]
        if self._turn_rewards_problem and any(has_turn_reward(attempt.trajectory) for attempt in attempts):
            raise ConfigError(
                "an agent or rollout_func gave a reward to a turn (add_reward(value, turn)), which "
                f"{self._turn_rewards_problem}; or give it to the trajectory: add_reward(value)"
            )
        own = [place for place, source in rewards.entries.given.items() if source.name == AGENT]
        if own:
            parts = [*parts, *((own[0], part) for part in own_rewards(attempts, inputs))]
        elif any(has_own_reward(attempt.trajectory) for attempt in attempts):
            raise ConfigError(f"an agent gave rewards, but GivenReward({AGENT!r}) is not among the reward functions")
        result = rewards.join(inputs, parts, failed)
        made = reward_columns(result, is_dense=rewards.is_dense)
        said = [
            attempt.trajectory.extra if key == attempt.keys[-1] else {} for attempt in attempts for key in attempt.keys
        ]
        made["extra"] = [
            {name: as_written(value) for name, value in of_agent.items()} | extra
            for of_agent, extra in zip(said, made["extra"], strict=True)
        ]
        report = RolloutReport({}, first_in_full(result.failures), logged_means(result), result.retried)
        return Batch({**columns, **made}), report

    def close(self) -> None:
        """Close the agent, if it has a method for that, and end the event loop that agents run on; idempotent."""
        close = getattr(self._agent, "close", None)
        if close is not None and not self._is_closed:
            close()
        self._is_closed = True
        self._turns.close()


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
