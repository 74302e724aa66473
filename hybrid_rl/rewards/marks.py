"""What a reward function says of itself: that it gives a number per token, that it compares the samples of a group."""

import functools
from typing import Any, TypeVar

DENSE, NEEDS_GROUP = "dense", "needs_group"

Function = TypeVar("Function")


def dense_reward(function: Function) -> Function:
    """Mark a reward function (or object) that may return, for a sample, a number per completion token.

    Its reward is their sum. Estimators that know of tokens take each number at its token; with any such function every
    batch has the column `token_rewards`.
    """
    setattr(function, DENSE, True)
    return function


def group_reward(function: Function) -> Function:
    """Mark a reward function (or object) that compares samples: each call must hold all completions of a prompt and no
    others, which score_by=group does."""
    setattr(function, NEEDS_GROUP, True)
    return function


def has_mark(function: Any, mark: str) -> bool:
    """Whether a function, or what partials wrap, is marked."""
    while True:
        if getattr(function, mark, False) is True:
            return True
        if not isinstance(function, functools.partial):
            return False
        function = function.func


def unwrap_partial(function: Any) -> Any:
    """The function inside any number of partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
