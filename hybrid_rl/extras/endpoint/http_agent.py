"""Agents that bring their own loop and speak to an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybrid_rl.agents.calls import offered
from hybrid_rl.agents.client import TrajectoryEndedError
from hybrid_rl.agents.episode import Episode
from hybrid_rl.agents.trajectory import Trajectory
from hybrid_rl.controller import enter_device
from hybrid_rl.data.prompts import PROMPT_COLUMN, shorten
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.extras.endpoint.routes import AgentServer
from hybrid_rl.extras.endpoint.sessions import Session
from hybrid_rl.process.threads import WATCH_SECONDS, LoopThread, LoopWatch, start_thread
from hybrid_rl.rewards.marks import is_async_callable

logger = logging.getLogger("hybrid_rl")

# Arguments after row, base_url and api_key: passed by name to functions that take them.
OPTIONAL = ("trainer_state", "environment", "trajectory")
STOP_SECONDS = 1.0
LIMITS = ("length", "turns", "time")
KEYS = {"length": "max_completion_length, or of the longest sequence", "turns": "max_tool_calling_iterations"}
REFUSED_SECONDS = 60.0  # after which an agent that a limit refused an answer, and that works on, is spoken of


class HttpAgent:
    """Runs episodes by a user's function `(row, base_url, api_key, **kw) -> float | dict | None`.

    function: gets the columns of the row as a dict, and where the policy answers. A coroutine function runs on an event
    loop that all of them share for the whole run, so that HTTP clients can be kept; a plain one in a thread of its own.
    It may take `trainer_state`, `environment` and `trajectory` besides.

    A number that it returns is the reward of the trajectory; None gives no reward. Of a dict, the item "reward" is the
    reward; the others are written to samples.jsonl, and means of numbers are logged as agent/NAME. If a limit ends the
    trajectory, and the function raises therefore instead of returning, that is no failure: the reward is 0.
    temperature: of the run; requests for another one are refused.

    Raises ConfigError for a function that cannot be called so.
    """

    def __init__(self, function: Callable[..., Any], *, temperature: float) -> None:
        self._function, self._temperature = function, temperature
        self._optional = _optional_arguments(function)
        self._server: AgentServer | None = None
        self._loop: LoopThread | None = None
        self._watch: LoopWatch | None = None
        self._has_told = False

    def sample_at(self, temperature: float) -> None:
        """Answer at this temperature from now on; call it between episodes."""
        self._temperature = temperature
        if self._server is not None:
            self._server.temperature = temperature

    async def __call__(self, episode: Episode) -> None:
        """Run an episode. Raises what the function raises; TrajectoryEndedError if it raised because a limit ended the
        trajectory; DataError for a result that is no reward."""
        if self._server is None or self._loop is None or self._watch is None:
            self._server = AgentServer(temperature=self._temperature)
            self._loop = LoopThread("agent functions", enter_device)
            self._watch = LoopWatch(self._loop)
        trajectory = episode.trajectory
        session = self._server.open(episode.client)
        offered = {
            "trainer_state": episode.trainer_state,
            "environment": trajectory.environment,
            "trajectory": trajectory,
        }
        arguments = {name: offered[name] for name in self._optional}
        row = _row_of(episode)
        url = self._server.base_url(session)
        called = self._loop.start(_call(partial(self._function, row, url, session.key, **arguments)))
        result = asyncio.wrap_future(called)
        try:
            while not (result.done() or session.failure.done()):
                ends = [result, session.failure]
                await asyncio.wait(ends, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                self._watch.look()
                self._look(session)
            if session.failure.done():
                session.failure.result()
            value = result.result()
            if isinstance(value, _Raised):
                if session.limit is not None and isinstance(value.error, Exception):
                    raise TrajectoryEndedError(session.limit) from value.error
                raise value.error
        except (TrajectoryEndedError, asyncio.CancelledError):
            if session.limit in LIMITS or trajectory.end_reason in LIMITS:
                trajectory.add_reward(0.0)
            raise
        finally:
            result.cancel()
            await self._server.end(session)
        _take_result(value, trajectory)
        if session.limit is not None or session.is_cut:
            trajectory.end(session.limit or "length")

    def _look(self, session: Session) -> None:
        """Say once in a run that a step waits for an agent that gets no further answer."""
        waited = 0.0 if session.refused_at is None else time.monotonic() - session.refused_at
        if waited < REFUSED_SECONDS or session.limit not in KEYS or self._has_told:
            return
        self._has_told = True
        logger.warning(
            "%.0f s ago a request of an agent was refused because its trajectory had reached the limit of %s, and the "
            "agent has not returned since: it may be trying again, and the step waits for it. Have the agent return "
            "at such an error, or set trajectory_timeout_seconds, which ends the trajectory with reward 0",
            *(waited, KEYS[session.limit]),
        )

    def close(self) -> None:
        """Stop the endpoint and the event loop of the functions. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._loop is not None:
            self._loop.stop()
            self._loop.thread.join(STOP_SECONDS)
        self._server = self._loop = self._watch = None


def _optional_arguments(function: Any) -> tuple[str, ...]:
    """Return those of OPTIONAL that a function takes. Raises ConfigError if it cannot be called."""
    form = "it is called as agent(row, base_url, api_key), and may take " + ", ".join(OPTIONAL) + " by name"
    if not callable(function):
        raise ConfigError(f"agent={shorten(function)} is not callable; {form}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return ()
    taken = tuple(offered(function, dict.fromkeys(OPTIONAL)))
    try:
        signature.bind(None, "", "", **dict.fromkeys(taken))
    except TypeError as error:
        raise ConfigError(f"the agent {shorten(function)} cannot be called: {error}; {form}") from None
    return taken


def _row_of(episode: Episode) -> dict[str, Any]:
    """Return a row that the function may change."""
    prompt = {} if episode.prompt is None else {PROMPT_COLUMN: episode.prompt}
    return copy.deepcopy({**episode.row, **prompt})


@dataclass(frozen=True)
class _Raised:
    """What a function raised."""

    error: BaseException


async def _call(function: partial[Any]) -> Any:
    """Call a function, coroutine function or not. Returns what it raises: sys.exit() in one would end the thread of
    all."""
    try:
        # Of a decorated function, what the decorator made counts: it may run it.
        if is_async_callable(function):
            return await function()
        result = await asyncio.wrap_future(_in_thread(function))
        return await result if inspect.isawaitable(result) else result
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return _Raised(error)


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread of its own: as many may wait as there are trajectories, and one that hangs does not
    keep the process from ending."""
    future: Future[Any] = Future()
    context = contextvars.copy_context()

    def body() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = context.run(function)
        except StopIteration as error:  # no future takes it
            future.set_exception(RuntimeError(f"the agent raised StopIteration({error.value!r})"))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    start_thread("agent", body, enter_device)
    return future


def _take_result(result: Any, trajectory: Trajectory) -> None:
    """Note what a function returned. Raises DataError for what is no reward."""
    reward = result
    if isinstance(result, Mapping):
        if unnamed := [name for name in result if not isinstance(name, str)]:
            raise DataError(f"the agent returned a dict with the key {shorten(unnamed[0])}; keys must be texts")
        others = {name: value for name, value in result.items() if name != "reward"}
        trajectory.extra.update(others)
        trajectory.metrics.update(
            {name: float(value) for name, value in others.items() if isinstance(value, int | float) and value == value}
        )
        reward = result.get("reward")
    if reward is None:
        return
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"the agent returned {shorten(result)} as its reward; return a finite number, a dict with one as its item "
            '"reward", or None for no reward'
        )
    trajectory.add_reward(number)
