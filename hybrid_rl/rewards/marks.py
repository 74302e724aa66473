"""Marks of reward functions: those that give a number per token, that compare the samples of a group, and that shape
what others give."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, TypeVar

DENSE, NEEDS_GROUP, SHAPING = "dense", "needs_group", "is_shaping"

Function = TypeVar("Function")


def dense_reward(function: Function) -> Function:
    """Mark a reward function (or object) that may return, for a sample, a number per completion token.

    Its reward is their sum. Estimators that work on tokens take each number at its token; with any such function every
    batch has the column `token_rewards`.
    """
    setattr(function, DENSE, True)
    return function


def group_reward(function: Function) -> Function:
    """Mark a reward function (or object) that compares samples: each call must hold all completions of a prompt and no
    others, as it does with score_by=group."""
    setattr(function, NEEDS_GROUP, True)
    return function


def shaping_reward(function: Function) -> Function:
    """Mark a reward function (or object) that says how an answer should be, such as its length, and not whether it is
    right. Its rewards count; but dynamic sampling (max_refills) judges groups by the other functions, if there are any:
    wrong answers of different lengths teach nothing that their lengths would not."""
    setattr(function, SHAPING, True)
    return function


def layers(function: Any) -> Iterator[Any]:
    """Yield a function, and what is inside of it as long as it is a functools.partial."""
    yield function
    while isinstance(function, functools.partial):
        function = function.func
        yield function


def has_mark(function: Any, mark: str) -> bool:
    """Whether a function, or what partials wrap, is marked."""
    return any(getattr(layer, mark, False) is True for layer in layers(function))


def unwrap_partial(function: Any) -> Any:
    """Return the function inside any number of partials."""
    return list(layers(function))[-1]


def is_async_callable(function: Any) -> bool:
    """Whether a call gives a coroutine; looks through partials and at `__call__` of objects."""
    inner = unwrap_partial(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004
