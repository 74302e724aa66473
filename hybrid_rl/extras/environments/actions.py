"""Environments whose tools are the actions of another library: a step for each call, rewards summed up."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hybrid_rl.errors import ConfigError


class Step(NamedTuple):
    """What an action came to. text: what the policy reads; reward: None counts as 0; is_done: no action follows."""

    text: str
    reward: float | None
    is_done: bool


class StepEnvironment:
    """What all environments of adapters have in common.

    rewards: of the steps of this episode, in order. is_done: whether no action is taken any more. info: what the last
    step told besides.
    """

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.is_done = True
        self.info: Any = None

    def _begin(self) -> None:
        self.rewards, self.is_done, self.info = [], False, None

    def _act(self, action: Any) -> Step:
        raise NotImplementedError

    def _take(self, action: Any) -> str:
        if self.is_done:
            raise ValueError("the episode is over; answer without a tool call")
        step = self._act(action)
        self.rewards.append(float(step.reward or 0.0))
        self.is_done = step.is_done
        return step.text + ("\n(The episode is over.)" if step.is_done else "")

    def get_reward(self) -> float:
        """Return the sum of the rewards of all steps."""
        return sum(self.rewards)


def with_actions(base: type[StepEnvironment], actions: Sequence[Callable[..., Any]]) -> type[StepEnvironment]:
    """Return a class whose tools are these functions: each makes an action of its arguments, which is then taken. Their
    type hints and docstrings are shown to the policy. Raises ConfigError if there is none, or if a name is taken."""
    if not actions:
        raise ConfigError(f"{base.__name__} has no actions; give at least one function with type hints and a docstring")
    methods: dict[str, Any] = {}
    for action in actions:
        name = getattr(action, "__name__", "")
        if not name.isidentifier() or hasattr(base, name) or name in methods:
            raise ConfigError(f"the action {action!r} is named {name!r}, which is taken or no name; define it by `def`")
        methods[name] = _method(action)
    return type(base.__name__, (base,), methods)


def _method(action: Callable[..., Any]) -> Callable[..., str]:
    def take(self: StepEnvironment, *values: Any, **arguments: Any) -> str:
        return self._take(action(*values, **arguments))

    # As the schema of a tool is made: from the name, the docstring and the signature of the action.
    functools.update_wrapper(take, action)
    signature = inspect.signature(action)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(take)["__signature__"] = signature.replace(
        parameters=[own, *signature.parameters.values()], return_annotation=str
    )
    take.__annotations__ = {**getattr(action, "__annotations__", {}), "return": str}
    del vars(take)["__wrapped__"]
    return take
