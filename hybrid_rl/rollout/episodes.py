"""The trajectories of a rollout of agents: each is begun, watched, ended and sent to be scored."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybrid_rl.agents.calls import offered
from hybrid_rl.agents.client import AgentClient, ChatFormat, Limits, TrajectoryEndedError
from hybrid_rl.agents.environments import EnvironmentLostError
from hybrid_rl.agents.episode import Agent, Episode
from hybrid_rl.agents.floor import RolloutClient, RolloutFunction, checked_trajectories
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.agents.turn_record import TurnRecord
from hybrid_rl.config.agent_keys import AgentConfig
from hybrid_rl.errors import AgentError, DataError
from hybrid_rl.metrics.metric_sums import now
from hybrid_rl.process import progress
from hybrid_rl.process.threads import CANCEL_SECONDS
from hybrid_rl.rewards import RewardInput, RewardRunner, TrainerState
from hybrid_rl.rewards.results import Part
from hybrid_rl.rollout.agent_columns import AGENT, Attempt, reward_input
from hybrid_rl.rollout.call import RolloutCall
from hybrid_rl.rollout.sample_columns import MAX_SUBMISSIONS
from hybrid_rl.rollout.turns import EngineTurns, TrajectoryTokens

logger = logging.getLogger("hybrid_rl")

_has_told_of_loss = False

# Of a trajectory whose environment is lost, in a row, in which it came no further; and the seconds before the second of
# them, twice as long before each next one: a server takes some time to come again.
LIVES, FIRST_WAIT_SECONDS = 6, 0.5
OPEN_PER_PLACE = 2  # trajectories under way for each that the engine runs at once: so many may wait for tools


@dataclass(frozen=True)
class EpisodeSettings:
    """How trajectories are made. agent: makes one; rollout_func: all of those of a call, or of a held group, instead of
    an agent. limits: of a trajectory; its length is that of the call. seed: of the run. max_running: sequences that the
    engine runs at once. tokenizer: offered to rollout_func. turn_rewards_problem: why turns may have no rewards of
    their own, a ConfigError if they get one; "" = they may. record: of the turns and calls that have ended.
    """

    chat: ChatFormat
    agent: Agent | None
    limits: Limits
    config: AgentConfig
    seed: int
    max_running: int
    rollout_func: RolloutFunction | None = None
    tokenizer: Any = None
    turn_rewards_problem: str = ""
    record: TurnRecord = field(default_factory=TurnRecord)

    @property
    def max_open(self) -> int:
        """Trajectories that are under way at once."""
        return self.config.max_open_trajectories or OPEN_PER_PLACE * self.max_running


class Room:
    """Room for trajectories that are under way at once: the first that waits goes first. limit: their number.
    max_environments: that they may have at once, from before they begin until nothing looks at them; None = any number.

    most_open: the largest number since it was set. num_rented: environments that are in use; num_waiting: trajectories
    that wait for one.
    """

    def __init__(self, limit: int, max_environments: int | None = None) -> None:
        self._places = asyncio.Semaphore(max(1, limit))
        self._environments = None if max_environments is None else asyncio.Semaphore(max(1, max_environments))
        self.num_open = self.most_open = self.num_rented = self.num_waiting = 0

    async def rent(self, trajectory: Trajectory) -> None:
        """Wait until this trajectory may have an environment, if their number is limited."""
        if self._environments is None:
            return
        self.num_waiting += 1
        try:
            await self._environments.acquire()
        finally:
            self.num_waiting -= 1
        self.num_rented += 1
        trajectory.on_left.append(self._free)

    def kept(self, trajectory: Trajectory) -> list[Callable[[], None]]:
        """Return the hooks by which a trajectory gives back what it has here, of those that it has when it is left; it
        has the others no longer, and they have been called."""
        kept = [hook for hook in trajectory.on_left if hook == self._free]
        for hook in trajectory.on_left:
            if hook != self._free:
                hook()
        trajectory.on_left = []
        return kept

    def _free(self) -> None:
        assert self._environments is not None
        self.num_rented -= 1
        self._environments.release()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it meanwhile."""
        async with self._places:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                yield
            finally:
                self.num_open -= 1


@dataclass(eq=False)
class Episodes:
    """The trajectories of one call of `TrajectoryStream.run`, or of one group that is held, on the event loop.

    turns: of the engine. limits: of each trajectory; rewards: None = nothing is scored. room: for those that are under
    way. state: of the run, which reward functions are told. max_submissions: calls of reward functions, if they score
    one by one. advance: called when a trajectory has ended. inputs: of reward functions, by trajectory; parts: what
    they returned. made_at: when the last trajectory ended. asked: what trajectories ask.
    """

    settings: EpisodeSettings
    turns: EngineTurns
    attempts: Sequence[Attempt]
    call: RolloutCall
    rewards: RewardRunner | None
    limits: Limits
    room: Room
    state: TrainerState
    max_submissions: int = MAX_SUBMISSIONS
    advance: Callable[[], None] = progress.advance
    inputs: dict[int, RewardInput] = field(default_factory=dict)
    parts: list[tuple[int, Part]] = field(default_factory=list)
    made_at: float = 0.0
    asked: list[TrajectoryTokens] = field(default_factory=list)
    _scoring: list[asyncio.Task[list[tuple[int, Part]]]] = field(default_factory=list)
    _unscored: dict[int, list[RewardInput]] = field(default_factory=dict)  # by group, until it is whole
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
        if self.settings.rollout_func is not None:
            await self._run_function(self.settings.rollout_func)
        else:
            # Begun in a fixed order, each as soon as there is room.
            await asyncio.gather(*map(self._one, self.attempts))

    async def _one(self, attempt: Attempt) -> None:
        await self.room.rent(attempt.trajectory)
        async with self.room.place():
            await self._run_agent(attempt)

    @property
    def is_made(self) -> bool:
        """Whether all trajectories have ended."""
        return len(self.inputs) == len(self.attempts)

    # -------------------------------------------------------------------------------------------- trajectories

    def _client(
        self, attempt: Attempt | None, trajectory: Trajectory, number: int = 0
    ) -> tuple[AgentClient, TrajectoryTokens]:
        """Make the client of a trajectory. attempt: None for answers that belong to none; number: of such an answer,
        among those to its prompt."""
        settings, call = self.settings, self.call
        group = call.first_id if attempt is None else attempt.group
        place, generation = (-1, number) if attempt is None else (attempt.task.place, attempt.generation)
        priority = call.first_id if attempt is None else attempt.identity  # the oldest first
        trajectory.past = None if attempt is None else attempt.record
        tokens = TrajectoryTokens(
            self.turns, call, seed=settings.seed, group=group, priority=priority, record=trajectory.past
        )
        self.asked.append(tokens)
        self.turns.enter(tokens)
        client = AgentClient(
            tokens,
            settings.chat,
            trajectory,
            self.limits,
            place=place,
            generation=generation,
            is_open=lambda: self.turns.is_open,
        )
        return client, tokens

    async def _run_agent(self, attempt: Attempt) -> None:
        """Make one trajectory; if its environment is lost, from what it has finished on another one."""
        seconds = self.settings.config.trajectory_timeout_seconds
        deadline = None if seconds is None else self.turns.seconds() + seconds
        tokens = await self._live(attempt, deadline)
        num_vain, most_ended = 1, attempt.record.num_ended
        while attempt.trajectory.is_lost and num_vain < LIVES:
            self.turns.leave(tokens)
            self._tell_of_loss(attempt)
            await asyncio.sleep(FIRST_WAIT_SECONDS * 2 ** (num_vain - 1))
            if deadline is not None and self.turns.seconds() >= deadline:
                break
            attempt.begin_again(self.room.kept(attempt.trajectory))
            tokens = await self._live(attempt, deadline)
            num_vain = 1 if attempt.record.num_ended > most_ended else num_vain + 1
            most_ended = max(most_ended, attempt.record.num_ended)
        if attempt.trajectory.is_lost:
            attempt.trajectory.counts["lost_environments"] += 1
            attempt.failure, attempt.trajectory.end_reason = attempt.failure or AGENT, "error"
        self.advance()
        self._ended(attempt)
        self.turns.leave(tokens)

    def _tell_of_loss(self, attempt: Attempt) -> None:
        """Warn of lost environments, once in a process."""
        global _has_told_of_loss
        if not _has_told_of_loss:
            _has_told_of_loss = True
            logger.warning(
                "an environment was lost: its trajectory goes on with another one, from what it has finished "
                "(agents/lost_environments counts them): %s",
                attempt.trajectory.error.strip().rpartition("\n")[2],
            )

    async def _live(self, attempt: Attempt, deadline: float | None) -> TrajectoryTokens:
        """Run the agent of a trajectory from its beginning to its end. deadline: on the clock of trajectories."""
        assert self.settings.agent is not None
        trajectory = attempt.trajectory
        client, tokens = self._client(attempt, trajectory)
        row = attempt.task.row
        episode = Episode(row.prompt if row.has_prompt else None, row.columns, client, trajectory, self.call.state)
        running = asyncio.ensure_future(_guarded(partial(_asked, self.settings.agent, episode), attempt))
        timer = [] if deadline is None else [asyncio.ensure_future(self._pass(deadline))]
        try:
            await asyncio.wait({running, *timer}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                trajectory.end("time")
                tokens.close("time")
                limit = self.settings.config.trajectory_timeout_seconds
                await _cancelled(running, attempt, f"trajectory_timeout_seconds={limit:g}")
        except asyncio.CancelledError:
            trajectory.end("abort")
            await _cancelled(running, attempt, "the rollout was cancelled")
            raise
        finally:
            for task in timer:
                task.cancel()
            tokens.close(trajectory.end_reason or "stop")
            await _finish(attempt)
        if running.done() and not running.cancelled():
            running.result()  # an AgentError
        if attempt.record.num_answered:
            trajectory.counts["recorded_turns"] = attempt.record.num_answered
        return tokens

    async def _pass(self, deadline: float) -> None:
        """Wait for a moment on the clock of trajectories, which counts the time in which the policy answers."""
        turns = self.turns
        while (left := deadline - turns.seconds()) > 0:
            await asyncio.sleep(max(left, 0.01))

    async def _run_function(self, function: RolloutFunction) -> None:
        """Have the user's function make all trajectories."""
        rows = [dict(attempt.trajectory.row) for attempt in self.attempts]
        self.room.most_open = max(self.room.most_open, len(rows))
        timers: list[asyncio.Task[None]] = []
        seconds = self.settings.config.trajectory_timeout_seconds

        def make(place: int | None, trajectory: Trajectory, number: int) -> AgentClient:
            client, tokens = self._client(None if place is None else self.attempts[place], trajectory, number)
            if place is not None and seconds is not None:
                # Whether it wants more by then only the function knows: its next question ends it.
                timers.append(asyncio.ensure_future(close_late(tokens, seconds)))
            return client

        async def close_late(tokens: TrajectoryTokens, seconds: float) -> None:
            await self._pass(self.turns.seconds() + seconds)
            tokens.close("time")

        if not self.attempts:
            return
        whole = Attempt(self.attempts[0].task, 0, 0, Trajectory())

        async def ask() -> None:
            keywords = {
                "trainer_state": self.call.state,
                "tokenizer": self.settings.tokenizer,
                "num_generations": self.call.num_generations,
            }
            try:
                answer = await function(rows, RolloutClient(rows, make), **offered(function, keywords))
            except TrajectoryEndedError as error:
                key = f" (trajectory_timeout_seconds={seconds:g})" if error.reason == "time" and seconds else ""
                refused = DataError(
                    f"{error}{key}, and rollout_func did not catch that, which costs all rows: make each by `return "
                    f"await client.each(rows, one)` with `async def one(row, trajectory)`; or catch "
                    f"hybrid_rl.agents.TrajectoryEndedError and return the trajectory all the same; what was recorded "
                    f"stays"
                )
                # With the frames of the question, and without a second exception to read first.
                raise refused.with_traceback(error.__traceback__) from None
            made = checked_trajectories(answer, len(rows))
            for attempt, trajectory in zip(self.attempts, made, strict=True):
                attempt.trajectory = trajectory

        await _guarded(ask, whole)
        for timer in timers:
            timer.cancel()
        for tokens in self.asked:
            tokens.close("stop")
        for attempt in self.attempts:
            await _finish(attempt)
            if whole.failure:
                attempt.trajectory, attempt.failure = whole.trajectory, whole.failure
            elif attempt.trajectory.end_reason == "error":
                attempt.failure = AGENT
            if attempt.record.num_answered:
                attempt.trajectory.counts["recorded_turns"] = attempt.record.num_answered
            attempt.trajectory.end("stop")
            self._ended(attempt)
        for tokens in self.asked:
            self.turns.leave(tokens)

    # ------------------------------------------------------------------------------------------------- rewards

    def _ended(self, attempt: Attempt) -> None:
        """Have a trajectory scored, together with others that ended before."""
        if attempt.trajectory.end_reason == "error" and not attempt.failure:
            attempt.failure = AGENT
        sample_input = self.inputs[attempt.identity] = reward_input(attempt, self.settings.chat.decode)
        rewards = self.rewards
        if rewards is None or attempt.failure or not rewards.reads_environments:
            self._release([attempt])
        if rewards is None:
            return
        # One that has failed has no completion to be scored, or to be compared with others.
        whole = [sample_input]
        if rewards.score_by == "group":
            members = self._unscored.setdefault(sample_input.group, [])
            members.append(sample_input)
            is_whole = len(members) == self.call.num_generations
            whole = sorted(members, key=lambda member: member.key) if is_whole else []
        failed = {rollout_attempt.identity for rollout_attempt in self.attempts if rollout_attempt.failure}
        self._ready += [sample for sample in whole if sample.key.trajectory not in failed]
        # What waits for an environment may wait for those that are to be scored.
        is_due = len(self.inputs) == len(self.attempts) or self.room.num_waiting > 0
        if self._ready and (is_due or len(self._ready) * self.max_submissions >= len(self.attempts)):
            scored, self._ready = self._ready, []
            self._scoring.append(asyncio.ensure_future(self._score(scored, rewards)))

    async def _score(self, inputs: Sequence[RewardInput], rewards: RewardRunner) -> list[tuple[int, Part]]:
        """Wait for the outcomes of all reward functions; what they needed of the trajectories is released then."""
        try:
            return await asyncio.wrap_future(rewards.submit(inputs, self.state))
        finally:
            keys = {sample.key.trajectory for sample in inputs}
            self._release([attempt for attempt in self.attempts if attempt.identity in keys])

    @staticmethod
    def _release(attempts: Iterable[Attempt]) -> None:
        """Tell these trajectories that nothing looks at their environments any more."""
        for attempt in attempts:
            hooks, attempt.trajectory.on_left = attempt.trajectory.on_left, []
            for hook in hooks:
                hook()


async def _asked(agent: Agent, episode: Episode) -> None:
    """Run an agent. Raises DataError if it returns before any limit although the policy was never asked."""
    await agent(episode)
    trajectory = episode.trajectory
    if trajectory.end_reason in (None, "stop") and not any(sample.token_ids for sample in trajectory.samples):
        raise DataError(
            "the agent returned without an answer of the policy, so there is nothing to train on: have its client use "
            "the base_url and api_key that it is called with (does it speak to another model?), or raise an exception "
            "that says why there is none"
        )


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


async def _guarded(work: Callable[[], Awaitable[None]], attempt: Attempt) -> None:
    """Run an agent to its end, and note how it ended."""
    trajectory = attempt.trajectory
    try:
        await work()
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
    except EnvironmentLostError as error:
        trajectory.is_lost = trajectory.end_reason is None
        _fail(attempt, error, AGENT)
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
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    attempt.failure = failure
    attempt.trajectory.end("error", "".join(traceback.format_exception(type(error), error, frames)))
