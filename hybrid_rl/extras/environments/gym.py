"""Gymnasium environments: the policy's tool calls are the actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid_rl.errors import DataError
from hybrid_rl.extras.environments.actions import Step, StepEnvironment, with_actions


def act(action: str) -> str:
    """Take an action.

    Args:
        action: The action, as the description of the environment names it.
    """
    return action


def gymnasium_environment(
    make: Callable[[], Any],
    *actions: Callable[..., Any],
    render: Callable[[Any], str] | None = None,
    instructions: str = "",
) -> type[StepEnvironment]:
    """Return an `environment_factory` of a Gymnasium environment.

    A row's column `seed`, if there is one, goes to reset(), and a column `options` too. The reward is the sum of all
    steps' rewards; `environments=` shows reward functions `env` (the environment), `rewards` and `info`.

    Args:
        make: returns an environment, such as `lambda: gymnasium.make("FrozenLake-v1")`.
        actions: functions with type hints and docstrings, each of which returns an element of `action_space`; they are
            the tools. None: one tool `act(action)` that takes the text itself, for spaces of text, and a number for
            discrete ones.
        render: the text of an observation. None: the observation, which must be text.
        instructions: what stands before the first observation.
    """

    class GymnasiumEnvironment(StepEnvironment):
        """A Gymnasium environment as tools."""

        def __init__(self) -> None:
            super().__init__()
            self.env = make()

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None, **row: Any) -> str:
            """Begin an episode and return what is seen first."""
            observation, self_info = self.env.reset(seed=seed, options=options)
            self._begin()
            self.info = self_info
            return instructions + self._text(observation)

        def _act(self, action: Any) -> Step:
            space = self.env.action_space
            if isinstance(action, str) and not space.contains(action) and hasattr(space, "n"):
                action = int(action) if action.strip().lstrip("-").isdigit() else action
            if not space.contains(action):
                raise ValueError(f"{action!r} is no action here; actions are {space}")
            observation, reward, is_terminated, is_truncated, self.info = self.env.step(action)
            return Step(self._text(observation), float(reward), bool(is_terminated or is_truncated))

        def _text(self, observation: Any) -> str:
            if render is not None:
                return render(observation)
            if not isinstance(observation, str):
                raise DataError(
                    f"the environment shows {type(observation).__name__}, not text; pass render=, a function from an "
                    "observation to text, to gymnasium_environment"
                )
            return observation

        def close(self) -> None:
            """Close the environment."""
            self.env.close()

    return with_actions(GymnasiumEnvironment, actions or (act,))
