"""The agent of tools and environments: it generates, runs the tool calls of the answer, and generates again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hybrid_rl.agents.calls import Caller
from hybrid_rl.agents.client import AgentClient
from hybrid_rl.agents.environments import (
    ENVIRONMENT_COLUMN,
    GET_REWARD,
    Environment,
    EnvironmentFailedError,
    EnvironmentKind,
    EnvironmentLostError,
    EnvironmentPool,
    with_observation,
)
from hybrid_rl.agents.episode import Episode
from hybrid_rl.agents.tools import Functions, ToolSet
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.agents.turn_record import TrajectoryRecord, conversation_digest
from hybrid_rl.config import AgentConfig
from hybrid_rl.data.prompts import Messages, shorten
from hybrid_rl.data.rendering import CALL_ERROR
from hybrid_rl.errors import DataError

# Of a row without a prompt; the environment adds what it is about (as in TRL).
EMPTY_PROMPT: Messages = [{"role": "user", "content": ""}]


class ToolAgent:
    """Runs episodes with the tools of all rows and those of an environment; one for all trajectories of a rank.

    tools: functions. kinds: of environments, none = only tools. caller, free: as `EnvironmentPool` takes them.
    """

    def __init__(
        self,
        tools: Sequence[Any],
        kinds: Sequence[EnvironmentKind],
        config: AgentConfig,
        *,
        caller: Caller | None = None,
        free: Sequence[Environment] = (),
    ) -> None:
        self._caller = caller or Caller(config.tool_timeout_seconds)
        self._functions = Functions(tools, self._caller, config.tool_processes)
        self._drops = config.unrestorable == "drop"
        self._is_by_name = any(kind.name is not None for kind in kinds)
        self._pool = EnvironmentPool(kinds, self._caller, free, config.max_environments) if kinds else None

    async def __call__(self, episode: Episode) -> None:
        """Run an episode: until an answer has no tool call, or until a limit."""
        trajectory, tools = episode.trajectory, self._functions.tools
        if isinstance(episode.prompt, str):
            raise DataError(f"tools need a prompt of chat messages; it is text: {shorten(episode.prompt)}")
        prompt: Messages = EMPTY_PROMPT if episode.prompt is None else episode.prompt
        if self._pool is not None:
            environment, observation = await self._pool.take(*self._asked(episode))
            trajectory.on_left.append(partial(self._pool.give_back, environment))
            trajectory.environment = environment.instance
            record = trajectory.past or TrajectoryRecord()
            self._check_restorable(environment.kind, trajectory, record)
            trajectory.on_end.append(partial(_end, environment, trajectory))
            with_observation(prompt, observation)  # it is looked at before it is recorded
            prompt = with_observation(prompt, await environment.begin(observation, record))
            tools = tools.with_tools(environment.tools())
        trajectory.prompt = prompt
        await converse(episode.client, prompt, tools)

    def _check_restorable(self, kind: EnvironmentKind, trajectory: Trajectory, record: TrajectoryRecord) -> None:
        """Raise EnvironmentFailedError if a trajectory has acted on an environment that was lost, and may not act again
        on another one."""
        is_lost = trajectory.counts["lost_environments"] > 0
        if self._drops and is_lost and record.has_acted and not (kind.has_state or kind.is_repeatable):
            trajectory.counts["dropped"] += 1
            raise EnvironmentFailedError(
                f"the trajectory had acted on an environment {kind.label} that is gone, and is dropped "
                "(agents.unrestorable=drop): give the class `state()` and `restore(state)`, or mark its methods "
                "@hybrid_rl.agents.repeatable if they may be called again on a fresh one"
            )

    def _asked(self, episode: Episode) -> tuple[str | None, dict[str, Any]]:
        """Return the kind of environment that an episode needs, and what its reset gets: all columns of the row; the
        one that names the kind only if there is but one kind."""
        row = dict(episode.row)
        name = row.pop(ENVIRONMENT_COLUMN, None) if self._is_by_name else None
        return name, row if episode.prompt is None else {"prompt": episode.prompt, **row}

    def close(self) -> None:
        """Close environments and threads. Idempotent; what hangs is not waited for."""
        if self._pool is not None:
            self._pool.close()
        self._functions.close()
        self._caller.close()


async def converse(client: AgentClient, prompt: Messages, tools: ToolSet) -> None:
    """Talk with the policy from a prompt on, running the tool calls of its answers. Ends the trajectory, or raises
    TrajectoryEndedError. Messages of tools count only if the policy has still room to answer them (as in TRL)."""
    trajectory, most, rounds = client.trajectory, client.limits.max_tool_calling_iterations, 0
    messages = list(prompt)
    answers: Messages = []  # of tools, which count as soon as the policy answers them
    while True:
        turn = await client.generate([*messages, *answers], tools=tools.schemas)
        new = [*answers, dict(turn.message)]
        messages += new
        trajectory.messages += new
        calls, mistake = turn.message.get("tool_calls"), turn.message.get(CALL_ERROR)
        if turn.finish_reason != "stop":  # a call that was cut off is not made
            trajectory.end("length" if turn.finish_reason == "length" else "abort")
            return
        if not calls and not mistake:
            trajectory.end("stop")
            return
        if most is not None and rounds >= most:
            trajectory.end("turns")
            return
        rounds += 1
        if calls:
            asked = conversation_digest(turn.prompt_ids, turn.token_ids)
            answers = await tools.answer(calls, trajectory.counts, trajectory.past, asked)
        else:  # the policy may try again
            trajectory.counts.update(tool_calls=1, tool_failures=1)
            answers = [{"role": client.chat.error_role, "content": str(mistake)}]


async def _end(environment: Environment, trajectory: Trajectory) -> None:
    """Bring the environment of a trajectory that has ended into its last state, and ask it for the reward, unless the
    trajectory came to nothing."""
    if trajectory.end_reason in ("error", "abort"):
        return
    try:
        await environment.catch_up()
    except EnvironmentLostError as error:
        trajectory.is_lost, trajectory.error = True, str(error)
        return
    except EnvironmentFailedError as error:
        trajectory.end_reason, trajectory.error = "error", str(error)
        return
    if not environment.kind.has_reward:
        return
    outcome = await environment.call(GET_REWARD, {})
    if environment.kind.says_lost(outcome.error):
        environment.is_lost, trajectory.is_lost = True, True
        trajectory.error = f"{GET_REWARD}() of the environment {environment.kind.label} raised {outcome.error!r:.500}"
    trajectory.given[environment.kind.class_name] = outcome.value if outcome.error is None else _failure(outcome.error)


def _failure(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"{GET_REWARD}() raised {error!r}")
