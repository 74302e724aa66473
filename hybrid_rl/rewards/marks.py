"""Marks of reward functions: those that give a number per token, and those that compare the samples of a group."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeVar

DENSE, NEEDS_GROUP = "dense", "needs_group"

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
