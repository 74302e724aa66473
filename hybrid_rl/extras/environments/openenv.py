"""OpenEnv environments, through a client of their server: the policy's tool calls are the actions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_rl.agents.environments import EnvironmentLostError, is_connection_error
from hybrid_rl.compat.openenv_client import connection_of
from hybrid_rl.extras.environments.actions import Step, StepEnvironment, with_actions


def openenv_environment(
    make_client: Callable[[], Any],
    *actions: Callable[..., Any],
    render: Callable[[Any], str] | None = None,
    reset_columns: tuple[str, ...] = ("seed", "episode_id"),
) -> type[StepEnvironment]:
    """Return an `environment_factory` of an OpenEnv environment.

    Every trajectory has a session of its own on the server; if the server is gone, it goes on in another session, in
    which its actions are taken again. The reward is the sum of the steps' rewards; those are
    sums already in some environments, whose `get_reward` you then write yourself, in a class that begins from this one.

    Args:
        make_client: returns a client, such as `lambda: EchoEnv(base_url="http://localhost:8000")`.
        actions: functions with type hints and docstrings, each of which returns an action of the environment; they are
            the tools.
        render: the text of an observation. None: its fields as JSON, less reward, done and metadata.
        reset_columns: columns of a row that reset() of the environment gets.
    """

    class OpenEnvEnvironment(StepEnvironment):
        """An OpenEnv environment as tools."""

        def __init__(self) -> None:
            super().__init__()
            client = make_client()
            self.client = client.sync() if hasattr(client, "sync") else client
            self.connection: Any = None  # of the episode

        def reset(self, **row: Any) -> str:
            """Begin an episode and return what is seen first."""
            result = self._ask(self.client.reset, **{name: row[name] for name in reset_columns if name in row})
            self._begin()
            self.is_done, self.info, self.connection = bool(result.done), result, connection_of(self.client)
            return self._text(result.observation)

        def _act(self, action: Any) -> Step:
            self.info = result = self._step(action)
            return Step(self._text(result.observation), result.reward, bool(result.done))

        def _ask(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            """Ask the server. Raises EnvironmentLostError if it is gone, and the session with it."""
            try:
                return method(*arguments, **keywords)
            except Exception as error:
                if is_connection_error(error):
                    raise EnvironmentLostError(f"the server of the session is gone: {error!r:.200}") from error
                raise

        def _step(self, action: Any) -> Any:
            result = self._ask(self.client.step, action)
            if connection_of(self.client) is not self.connection:
                raise EnvironmentLostError(
                    "the client has lost its connection and opened another one: its session has never been reset, and "
                    "the one of this episode is gone"
                )
            return result

        def _text(self, observation: Any) -> str:
            return (render or fields_as_json)(observation)

        def close(self) -> None:
            """End the session."""
            self.client.close()

    return with_actions(OpenEnvEnvironment, actions)


def fields_as_json(observation: Any) -> str:
    """Return the fields of an observation that tell something, as JSON; text stays text."""
    if isinstance(observation, str):
        return observation
    if hasattr(observation, "model_dump"):
        fields = observation.model_dump()
    elif dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        fields = dataclasses.asdict(observation)
    else:
        fields = observation
    if isinstance(fields, Mapping):
        fields = {name: value for name, value in fields.items() if name not in ("reward", "done", "metadata")}
    return json.dumps(fields, default=str, ensure_ascii=False)
