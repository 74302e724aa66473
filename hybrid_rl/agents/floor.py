"""The floor: a rollout that users write themselves, `async def rollout_func(rows, client, **kw)`."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hybrid_rl.agents.client import AgentClient, TrajectoryEndedError
from hybrid_rl.agents.trajectory import Trajectory, Turn
from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import AgentError, ConfigError, DataError, counted

Row = dict[str, Any]
# Makes a trajectory for each row, in order, by asking the client.
RolloutFunction = Callable[..., Awaitable[Sequence[Trajectory]]]
# Makes the trajectory of one row.
RunRow = Callable[[Row, Trajectory], Awaitable[Any]]


class RolloutClient:
    """The policy, for all trajectories of a rollout. rows: one dict for each trajectory to make.

    make: the client of a trajectory by the place of its row; None: of an answer that belongs to no row, with how often
    its prompt was asked before.
    """

    def __init__(self, rows: Sequence[Row], make: Callable[[int | None, Trajectory, int], AgentClient]) -> None:
        self._places = {id(row): place for place, row in enumerate(rows)}
        self._make = make
        self._clients: dict[int, tuple[Trajectory, AgentClient]] = {}
        self._asked: Counter[str] = Counter()  # prompts of answers that belong to no row

    def trajectory(self, row: Mapping[str, Any]) -> Trajectory:
        """Begin the trajectory of a row, one of those that the function was given. Raises DataError for another."""
        if id(row) not in self._places:
            raise DataError("client.trajectory(row) takes one of the rows that the function was given, not a copy")
        trajectory = Trajectory(row)
        self._clients[id(trajectory)] = trajectory, self._make(self._places[id(row)], trajectory, 0)
        return trajectory

    async def each(self, rows: Sequence[Row], run: RunRow) -> list[Trajectory]:
        """Run all rows at once, each with a trajectory of its own, and return the trajectories in the order of rows.

        What ends one row ends no other: a limit ends a trajectory with its reason, an exception with "error". An
        AgentError ends the run.
        """

        async def one(row: Row) -> Trajectory:
            trajectory = self.trajectory(row)
            try:
                await run(row, trajectory)
            except TrajectoryEndedError as ended:
                trajectory.end(ended.reason)
            except AgentError:
                raise
            except Exception as error:
                # Without the frame of this method.
                frames = error.__traceback__.tb_next if error.__traceback__ else None
                trajectory.end("error", "".join(traceback.format_exception(type(error), error, frames)))
            return trajectory

        return list(await asyncio.gather(*map(one, rows)))

    async def generate(
        self,
        prompt: Sequence[int] | Messages | str,
        trajectory: Trajectory | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        **unknown: Any,
    ) -> Turn:
        """Return the policy's answer to token ids, chat messages or text.

        trajectory: records it, if it is one of `self.trajectory`; None: nothing does. The other arguments, and what is
        raised, are those of `AgentClient.generate`. Raises DataError for any other argument.
        """
        if unknown:
            raise DataError(
                f"client.generate got {', '.join(unknown)}, but takes tools, max_tokens and stop only: every answer is "
                "sampled as the run's configuration says, since that is what training assumes"
            )
        if trajectory is None:
            key = repr(prompt)
            number, self._asked[key] = self._asked[key], self._asked[key] + 1
            recorded = Trajectory()
            client = self._make(None, recorded, number)
        elif id(trajectory) in self._clients:
            recorded, client = self._clients[id(trajectory)]
        else:
            raise DataError(
                "generate(..., trajectory) takes a trajectory that client.trajectory(row) has made; leave it out for "
                "an answer that your own Trajectory keeps"
            )
        try:
            return await client.generate(prompt, tools=tools, max_tokens=max_tokens, stop=stop)
        except TrajectoryEndedError as error:
            recorded.end(error.reason)
            raise


def checked_trajectories(answer: Any, num_rows: int) -> list[Trajectory]:
    """Return what a rollout_func has returned. Raises DataError unless it is a trajectory for each row, every one with
    a token of the policy or an error, and with one number per token."""
    if not isinstance(answer, list | tuple) or not all(isinstance(entry, Trajectory) for entry in answer):
        raise DataError(
            f"rollout_func returned {answer!r:.200} of type {type(answer).__name__}; return a list of Trajectory, one "
            f"for each row, in the order of the rows"
        )
    if len(answer) != num_rows:
        raise DataError(
            f"rollout_func returned a list of {len(answer)} for {counted(num_rows, 'row')}; return one trajectory for "
            f"each row, in the order of the rows"
        )
    if len({id(entry) for entry in answer}) != num_rows:
        raise DataError("rollout_func returned the same trajectory more than once; make one for each row")
    for place, trajectory in enumerate(answer):
        _check(trajectory, f"rollout_func returned for row {place} a trajectory")
    return list(answer)


def _check(trajectory: Trajectory, what: str) -> None:
    if not any(True in sample.mask for sample in trajectory.samples) and trajectory.end_reason in (None, "stop"):
        raise DataError(
            f"{what} without a token of the policy; ask by client.generate(..., trajectory), or tell why there is "
            f'none by trajectory.end("error", "...")'
        )
    for number, sample in enumerate(trajectory.samples):
        lengths = {name: len(getattr(sample, name)) for name in ("token_ids", "mask", "logprobs", "versions")}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{what} whose sample {number} differs in the number of its entries: {lengths}")
        if not sample.prompt_ids:
            raise DataError(f"{what} whose sample {number} has no prompt_ids; give at least one token")
        if len(sample.turn_rewards) != len(sample.turns):
            raise DataError(
                f"{what} whose sample {number} has {counted(len(sample.turns), 'turn')} and "
                f"{len(sample.turn_rewards)} turn_rewards; give one (or None) for each turn"
            )


def check_rollout_func(function: Any) -> None:
    """Raise ConfigError for a rollout_func that cannot be awaited."""
    if not callable(function):
        raise ConfigError(f"rollout_func={function!r} cannot be called; pass an `async def f(rows, client, **kw)`")
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a builtin
        parameters = []
    if "trainer" in parameters[1:2]:
        raise ConfigError(
            f"rollout_func takes ({', '.join(parameters)}), as TRL's does; this one is another: `async def f(rows, "
            "client, **kw)` gets dataset rows, asks by `await client.generate(messages, trajectory)`, and returns the "
            "trajectories that client.trajectory(row) made, one for each row"
        )
    call = getattr(function, "__call__", None)  # noqa: B004
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)):
        raise ConfigError(
            "rollout_func is a plain function: it would stop every other trajectory, and the engine, while it works; "
            "write `async def`, await client.generate(...), and run what blocks by `await asyncio.to_thread(...)`"
        )
