"""A worker's share of a rollout of agents: each trajectory goes on by itself, and is scored when it ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybrid_rl.agents.client import AgentClient, ChatFormat, Limits, TrajectoryEndedError
from hybrid_rl.agents.episode import Agent, Episode
from hybrid_rl.agents.floor import RolloutClient, RolloutFunction, checked_trajectories
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.batch import Batch
from hybrid_rl.config.agent_keys import AgentConfig
from hybrid_rl.engines.client import EngineClient
from hybrid_rl.errors import AgentError, ConfigError, DataError
from hybrid_rl.metrics import Timings, now
from hybrid_rl.process.threads import CANCEL_SECONDS
from hybrid_rl.rewards import RewardInput, RewardRunner
from hybrid_rl.rewards.results import Part
from hybrid_rl.rollout.agent_columns import (
    AGENT,
    Attempt,
    agent_metrics,
    as_written,
    has_own_reward,
    own_rewards,
    reward_input,
    sample_inputs,
    trajectory_columns,
)
from hybrid_rl.rollout.call import RolloutCall, RolloutTask
from hybrid_rl.rollout.judged import Encode, JudgeRound
from hybrid_rl.rollout.late import merge_late
from hybrid_rl.rollout.scored import (
    MAX_SUBMISSIONS,
    RolloutReport,
    first_in_full,
    logged_means,
    reward_columns,
    whole_groups,
)
from hybrid_rl.rollout.turns import EngineTurns, TrajectoryTokens

logger = logging.getLogger("hybrid_rl")

OPEN_PER_PLACE = 2  # trajectories under way for each that the engine runs at once: so many may wait for tools


class AgentRollout:
    """Makes scored samples of trajectories, each of which an agent makes.

    agent: makes one trajectory; rollout_func: all of them, instead of an agent. limits: of a trajectory; its length is
    that of the call. max_running: sequences that the engine runs at once. tokenizer: offered to rollout_func.
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
    ) -> None:
        self._client, self._rewards, self._chat, self._agent = client, rewards, chat, agent
        self._limits, self._seed, self._config = limits, seed, config
        self._rollout_func, self._tokenizer = rollout_func, tokenizer
        self._max_open = config.max_open_trajectories or OPEN_PER_PLACE * max_running
        self._turns = EngineTurns(client)
        if (agent is None) == (rollout_func is None):
            raise ConfigError("a rollout of agents takes either an agent or a rollout_func")
        if rollout_func is not None:
            check_rollout_func(rollout_func)
        self._is_closed = False
        self._judges: JudgeRound | None = None
        if rewards is not None and rewards.entries.judges:
            if encode is None:
                raise ConfigError("an EngineJudge needs the policy's tokenizer: pass encode= to AgentRollout")
            self._judges = JudgeRound(client, rewards, chat.decode, encode, seed=seed, max_length=max_length)

    def run(self, tasks: Sequence[RolloutTask], call: RolloutCall) -> tuple[Batch, RolloutReport]:
        """Return the samples of num_generations trajectories for each of these prompts, prompt by prompt. Raises
        KeyboardInterrupt if an interrupt was requested."""
        timings = Timings()
        attempts = [
            Attempt(task, generation, call.trajectory(task, generation), Trajectory(_row_of(task)))
            for task in tasks
            for generation in range(call.num_generations)
        ]
        rewards = self._rewards if call.is_scored else None
        before = self._client.stats()
        with self._client.session():
            share = _Share(self, attempts, call, rewards, _limits_of(self._limits, tasks, call))
            start = now()
            self._turns.run(share.run, call.version)
            end = now()
            timings.add("rollout", share.made_at - start)
            timings.add("reward", end - share.made_at)
            columns = trajectory_columns(attempts, call, self._chat.decode)
            agents = agent_metrics(attempts, before, self._client.stats(), share.most_open)
            if rewards is None:
                return Batch(columns), RolloutReport(timings.seconds, metrics=agents)
            batch, report = self._scored(columns, attempts, share, rewards)
            report.seconds, report.metrics = timings.seconds, agents
            if self._judges is not None:
                with timings.measure("judge"):
                    late = self._judges.run(batch, call)
                report.logged.merge(late.logged)
                batch, report.failures = merge_late(batch, report.failures, rewards, late)
            return batch, report

    def _scored(
        self, columns: dict[str, Any], attempts: Sequence[Attempt], share: _Share, rewards: RewardRunner
    ) -> tuple[Batch, RolloutReport]:
        """Join rewards of functions with those that agents gave."""
        inputs = sample_inputs(attempts, share.inputs)
        parts = share.parts
        own = [place for place, source in rewards.entries.given.items() if source.name == AGENT]
        if own:
            parts = [*parts, *((own[0], part) for part in own_rewards(attempts, inputs))]
        elif any(has_own_reward(attempt.trajectory) for attempt in attempts):
            raise ConfigError(f"an agent gave rewards, but GivenReward({AGENT!r}) is not among the reward functions")
        failed = [failure for attempt in attempts if (failure := attempt.reward_failure()) is not None]
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


@dataclass(eq=False)
class _Share:
    """One call of `AgentRollout.run`, on the event loop. inputs: of reward functions, by trajectory; parts: what they
    returned. made_at: when the last trajectory ended; most_open: trajectories that were under way at once."""

    rollout: AgentRollout
    attempts: Sequence[Attempt]
    call: RolloutCall
    rewards: RewardRunner | None
    limits: Limits
    inputs: dict[int, RewardInput] = field(default_factory=dict)
    parts: list[tuple[int, Part]] = field(default_factory=list)
    made_at: float = 0.0
    most_open: int = 0
    _num_open: int = 0
    _scoring: list[asyncio.Task[list[tuple[int, Part]]]] = field(default_factory=list)
    _unscored: dict[int, list[RewardInput]] = field(default_factory=dict)  # of groups that are not whole yet
    _ready: list[RewardInput] = field(default_factory=list)

    async def run(self) -> None:
        """Make all trajectories, and wait until they are scored."""
        try:
            await self._make()
            self.made_at = now()
            for scoring in self._scoring:
                self.parts += await scoring
        finally:
            self._release(self.attempts)

    async def _make(self) -> None:
        if self.rollout._rollout_func is not None:
            await self._run_function(self.rollout._rollout_func)
        else:
            # Begun in a fixed order, each as soon as there is room.
            waiting = iter(self.attempts)

            async def one_after_another() -> None:
                for attempt in waiting:
                    await self._run_agent(attempt)

            limit = min(self.rollout._max_open, len(self.attempts))
            await asyncio.gather(*(one_after_another() for _ in range(limit)))

    # -------------------------------------------------------------------------------------------- trajectories

    def _client(
        self, attempt: Attempt | None, trajectory: Trajectory, number: int = 0
    ) -> tuple[AgentClient, TrajectoryTokens]:
        """Make the client of a trajectory. attempt: None for answers that belong to none; number: of such an answer,
        among those to its prompt."""
        rollout, call = self.rollout, self.call
        group = call.first_id if attempt is None else call.group(attempt.task)
        place, generation = (-1, number) if attempt is None else (attempt.task.place, attempt.generation)
        priority = 0 if attempt is None else place * call.num_generations + generation
        tokens = TrajectoryTokens(rollout._turns, call, seed=rollout._seed, group=group, priority=priority)
        client = AgentClient(
            tokens,
            rollout._chat,
            trajectory,
            self.limits,
            place=place,
            generation=generation,
            is_open=lambda: rollout._turns.is_open,
        )
        return client, tokens

    async def _run_agent(self, attempt: Attempt) -> None:
        """Make one trajectory."""
        assert self.rollout._agent is not None
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        trajectory = attempt.trajectory
        client, tokens = self._client(attempt, trajectory)
        row = attempt.task.row
        episode = Episode(row.prompt if row.has_prompt else None, row.columns, client, trajectory, self.call.state)
        running = asyncio.ensure_future(_guarded(self.rollout._agent(episode), attempt))
        seconds = self.rollout._config.trajectory_timeout_seconds
        try:
            await asyncio.wait({running}, timeout=seconds)
            if not running.done():
                trajectory.end("time")
                tokens.close("time")
                await _cancelled(running, attempt, f"trajectory_timeout_seconds={seconds:g}")
        except asyncio.CancelledError:
            trajectory.end("abort")
            await _cancelled(running, attempt, "the rollout was cancelled")
            raise
        finally:
            tokens.close(trajectory.end_reason or "stop")
            await _finish(attempt)
        if running.done() and not running.cancelled():
            running.result()  # an AgentError
        self._num_open -= 1
        self._ended(attempt)

    async def _run_function(self, function: RolloutFunction) -> None:
        """Have the user's function make all trajectories."""
        rows = [dict(attempt.trajectory.row) for attempt in self.attempts]
        self.most_open = len(rows)
        begun: list[TrajectoryTokens] = []
        timers: list[asyncio.TimerHandle] = []
        seconds = self.rollout._config.trajectory_timeout_seconds

        def make(place: int | None, trajectory: Trajectory, number: int) -> AgentClient:
            client, tokens = self._client(None if place is None else self.attempts[place], trajectory, number)
            begun.append(tokens)
            if place is not None and seconds is not None:
                # Whether it wants more by then only the function knows: its next question ends it.
                timers.append(asyncio.get_running_loop().call_later(seconds, tokens.close, "time"))
            return client

        whole = Attempt(self.attempts[0].task, 0, 0, Trajectory()) if self.attempts else None
        if whole is None:
            return

        async def ask() -> None:
            keywords = offered(
                function,
                trainer_state=self.call.state,
                tokenizer=self.rollout._tokenizer,
                num_generations=self.call.num_generations,
            )
            try:
                answer = await function(rows, RolloutClient(rows, make), **keywords)
            except TrajectoryEndedError as error:
                raise DataError(
                    f"{error}, and rollout_func did not catch that: catch TrajectoryEndedError around what you ask "
                    f"for one trajectory, and return the trajectory all the same; what was recorded stays"
                ) from error
            made = checked_trajectories(answer, len(rows))
            for attempt, trajectory in zip(self.attempts, made, strict=True):
                attempt.trajectory = trajectory

        await _guarded(ask(), whole)
        for timer in timers:
            timer.cancel()
        for tokens in begun:
            tokens.close("stop")
        for attempt in self.attempts:
            await _finish(attempt)
            if whole.failure:
                attempt.trajectory, attempt.failure = whole.trajectory, whole.failure
            elif attempt.trajectory.end_reason == "error":
                attempt.failure = AGENT
            attempt.trajectory.end("stop")
            self._ended(attempt)

    # ------------------------------------------------------------------------------------------------- rewards

    def _ended(self, attempt: Attempt) -> None:
        """Have a trajectory scored, together with others that ended before."""
        if attempt.trajectory.end_reason == "error" and not attempt.failure:
            attempt.failure = AGENT
        found = self.inputs[attempt.identity] = reward_input(attempt, self.call, self.rollout._chat.decode)
        rewards = self.rewards
        if rewards is None:
            return
        if rewards.score_by == "group":
            self._ready += whole_groups(self._unscored, [found], self.call.num_generations)
        elif not attempt.failure:
            self._ready.append(found)
        is_last = len(self.inputs) == len(self.attempts)
        if self._ready and (is_last or len(self._ready) * MAX_SUBMISSIONS >= len(self.attempts)):
            scored, self._ready = self._ready, []
            self._scoring.append(asyncio.ensure_future(self._score(scored, rewards)))

    async def _score(self, inputs: Sequence[RewardInput], rewards: RewardRunner) -> list[tuple[int, Part]]:
        """Wait for the outcomes of all reward functions; what they needed of the trajectories is released then."""
        try:
            return await asyncio.wrap_future(rewards.submit(inputs, self.call.state))
        finally:
            keys = {sample.key.trajectory for sample in inputs}
            self._release([attempt for attempt in self.attempts if attempt.identity in keys])

    @staticmethod
    def _release(attempts: Iterable[Attempt]) -> None:
        """Tell these trajectories that they are scored, or will not be."""
        for attempt in attempts:
            hooks, attempt.trajectory.on_scored = attempt.trajectory.on_scored, []
            for hook in hooks:
                hook()


async def _finish(attempt: Attempt) -> None:
    """Tell a trajectory that it has ended."""
    hooks, attempt.trajectory.on_end = attempt.trajectory.on_end, []
    for hook in hooks:
        await hook()


async def _cancelled(running: asyncio.Task[None], attempt: Attempt, why: str) -> None:
    """Cancel an agent, and wait for it if it lets itself be cancelled."""
    running.cancel()
    await asyncio.wait({running}, timeout=CANCEL_SECONDS)
    if not running.done():
        logger.warning(
            "the agent of trajectory %d was cancelled (%s), but goes on; what it does is not used. Let "
            "asyncio.CancelledError pass",
            *(attempt.identity, why),
        )


async def _guarded(work: Awaitable[None], attempt: Attempt) -> None:
    """Run an agent to its end, and note how it ended."""
    trajectory = attempt.trajectory
    try:
        await work
    except TrajectoryEndedError as error:
        trajectory.end(error.reason)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            trajectory.end("abort")
            raise
        _fail(attempt, error, AGENT)
    except AgentError:
        trajectory.end("error")
        raise
    except Exception as error:
        _fail(attempt, error, AGENT)
    except KeyboardInterrupt as error:
        _fail(attempt, error, "interrupt")
    except BaseException as error:  # as sys.exit() raises: asyncio would end the event loop with it
        _fail(attempt, error, "ended")
    else:
        trajectory.end("stop")


def _fail(attempt: Attempt, error: BaseException, failure: str) -> None:
    """Note that an agent has failed; after a limit has ended its trajectory, that is no failure."""
    if attempt.trajectory.end_reason is not None and failure == AGENT:
        return
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without our own frame
    attempt.failure = failure
    attempt.trajectory.end("error", "".join(traceback.format_exception(type(error), error, frames)))


def _limits_of(limits: Limits, tasks: Sequence[RolloutTask], call: RolloutCall) -> Limits:
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


def _row_of(task: RolloutTask) -> dict[str, Any]:
    prompt = {"prompt": task.row.prompt} if task.row.has_prompt else {}
    return {**task.row.columns, **prompt}


def check_rollout_func(function: Any) -> None:
    """Raise ConfigError for a rollout_func that cannot be awaited."""
    if not callable(function):
        raise ConfigError(f"rollout_func={function!r} cannot be called; pass an `async def f(rows, client, **kw)`")
    call = getattr(function, "__call__", None)  # noqa: B004
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)):
        raise ConfigError(
            "rollout_func is a plain function: it would stop every other trajectory, and the engine, while it works; "
            "write `async def`, await client.generate(...), and run what blocks by `await asyncio.to_thread(...)`"
        )


def offered(function: Callable[..., Any], **keywords: Any) -> dict[str, Any]:
    """Return those of the keyword arguments that a function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return keywords
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in keywords.items() if name in names}
