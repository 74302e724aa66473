"""Ready-made rewards that look at length and form. Lengths are in tokens of the completion, the final end-of-sequence
token counted.

Each factory gives a function for `reward_funcs`. Length rewards wrap a function that says what is correct: they call it
with what it wants, and take a sample for correct where it gives at least `success`; None of it stays None.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.functions import Messages, function_name, is_async_callable
from hybrid_rl.rewards.marks import NEEDS_GROUP, group_reward, has_mark
from hybrid_rl.rewards.verifiers import completion_text

RewardFunctionLike = Callable[..., Any]
# Of one call: the wrapped function's values, the lengths, and what else the length reward asked for.
Shape = Callable[[Sequence[float | None], Sequence[int], Mapping[str, Any]], list[float | None]]

THINK_ANSWER = r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def overlong_penalty(max_completion_length: int, buffer: int) -> RewardFunctionLike:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to max_completion_length - buffer tokens, then
    falling in a straight line to -1 at max_completion_length, and -1 beyond. To be added to a reward of correctness.
    """
    if not 0 < buffer <= max_completion_length:
        raise ConfigError(f"buffer={buffer} must be from 1 to max_completion_length={max_completion_length}")

    def overlong_penalty(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        free = max_completion_length - buffer
        return [max(min((free - len(ids)) / buffer, 0.0), -1.0) for ids in completion_ids]

    return overlong_penalty


def cosine_reward(
    correct: RewardFunctionLike,
    max_completion_length: int,
    *,
    correct_shortest: float = 2.0,
    correct_longest: float = 1.0,
    wrong_shortest: float = -10.0,
    wrong_longest: float = 0.0,
    exceeded: float = -10.0,
    success: float = 1.0,
) -> RewardFunctionLike:
    """The cosine length reward (arXiv:2502.03373, section 4): with L = max_completion_length a completion of t tokens
    gets

        longest + (shortest - longest) (1 + cos(pi t / L)) / 2

    with the two values of correct or of wrong ones, and `exceeded` from L tokens on. Defaults are the paper's. It
    stands in the place of the reward of correctness.

    The paper gives R(t = 0) = r_0 and R(t = L) = r_L, but passes them as CosFn's minimum and maximum, which would swap
    them; what is meant is taken.
    """
    _check_positive(max_completion_length=max_completion_length)

    def shape(values: Sequence[float | None], lengths: Sequence[int], _: Mapping[str, Any]) -> list[float | None]:
        rewards: list[float | None] = []
        for value, length in zip(values, lengths, strict=True):
            if value is None:
                rewards.append(None)
            elif length >= max_completion_length:
                rewards.append(exceeded)
            else:
                pair = (correct_shortest, correct_longest) if value >= success else (wrong_shortest, wrong_longest)
                share = (1 + math.cos(math.pi * length / max_completion_length)) / 2
                rewards.append(pair[1] + (pair[0] - pair[1]) * share)
        return rewards

    return _wrap(correct, "cosine_reward", shape)


def kimi_length_reward(correct: RewardFunctionLike, *, weight: float = 1.0, success: float = 1.0) -> RewardFunctionLike:
    """Kimi k1.5's length penalty (arXiv:2501.12599, section 2.3.3), added to the reward of correctness: within the
    group of a prompt, with lambda = 0.5 - (length - min) / (max - min), a correct completion gets lambda and a wrong
    one min(0, lambda); 0 where all are of one length. Needs score_by=group.

    weight: of this part; the paper has one and warms it up, but names no number. Samples that the wrapped function does
    not apply to count neither for min nor for max (the paper has no such).
    """

    def shape(values: Sequence[float | None], lengths: Sequence[int], _: Mapping[str, Any]) -> list[float | None]:
        counted = [length for value, length in zip(values, lengths, strict=True) if value is not None]
        shortest, longest = min(counted, default=0), max(counted, default=0)
        rewards: list[float | None] = []
        for value, length in zip(values, lengths, strict=True):
            if value is None:
                rewards.append(None)
                continue
            part = 0.0 if longest == shortest else 0.5 - (length - shortest) / (longest - shortest)
            rewards.append(value + weight * (part if value >= success else min(0.0, part)))
        return rewards

    return group_reward(_wrap(correct, "kimi_length_reward", shape))


def lcpo_exact(
    correct: RewardFunctionLike, *, alpha: float = 0.0003, success: float = 1.0, column: str = "target_length"
) -> RewardFunctionLike:
    """L1's LCPO-Exact (arXiv:2503.04697, eq. 1): [correct] - alpha |target - length|. The target stands in the prompt
    and, in tokens, in a dataset column; a sample without one gets None. alpha: the paper's."""
    return _targeted(correct, "lcpo_exact", column, success, lambda good, left: good - alpha * abs(left))


def lcpo_max(
    correct: RewardFunctionLike,
    *,
    alpha: float = 0.0003,
    delta: float = 0.5,
    success: float = 1.0,
    column: str = "target_length",
) -> RewardFunctionLike:
    """L1's LCPO-Max (arXiv:2503.04697, eq. 2): [correct] clip(alpha (target - length) + delta, 0, 1), for a target that
    is a limit. delta keeps a correct answer that is a little over it above a wrong one. alpha and delta: the paper's.
    """
    return _targeted(
        correct, "lcpo_max", column, success, lambda good, left: good * min(max(alpha * left + delta, 0.0), 1.0)
    )


def format_reward(pattern: str = THINK_ANSWER) -> RewardFunctionLike:
    """1 where the whole completion matches a regular expression ("." takes newlines too), else 0. The default wants one
    <think>...</think> and one <answer>...</answer> behind it, with nothing but white space around them."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r} is no regular expression: {error}") from error

    def format_reward(completions: Sequence[str | Messages]) -> list[float]:
        return [float(compiled.fullmatch(completion_text(completion)) is not None) for completion in completions]

    return format_reward


def tag_count_reward(tags: Sequence[str] = TAGS) -> RewardFunctionLike:
    """The share of these tags that a completion holds exactly once: partial credit on the way to `format_reward`."""
    if isinstance(tags, str) or not tags or not all(tags):
        raise ConfigError(f"tags={tags!r}; give a list of tags, none of them empty")
    wanted = tuple(tags)

    def tag_count_reward(completions: Sequence[str | Messages]) -> list[float]:
        texts = map(completion_text, completions)
        return [sum(text.count(tag) == 1 for tag in wanted) / len(wanted) for text in texts]

    return tag_count_reward


def _targeted(
    correct: RewardFunctionLike, name: str, column: str, success: float, rule: Callable[[float, float], float]
) -> RewardFunctionLike:
    """rule: of 1.0 or 0.0 for correct, and the tokens that are left to the target."""

    def shape(values: Sequence[float | None], lengths: Sequence[int], asked: Mapping[str, Any]) -> list[float | None]:
        return [
            None if value is None or target is None else rule(float(value >= success), target - length)
            for value, length, target in zip(values, lengths, asked[column], strict=True)
        ]

    return _wrap(correct, name, shape, column)


def _wrap(correct: RewardFunctionLike, name: str, shape: Shape, *columns: str) -> RewardFunctionLike:
    """A reward function that takes what `correct` takes, completion_ids and the columns, and is `async` as it is."""
    if not callable(correct):
        raise ConfigError(f"{name} wraps a reward function that says what is correct, not {correct!r}")
    signature = inspect.signature(correct)
    takes_everything = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    named = frozenset(p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD)

    def own(given: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in given.items() if takes_everything or key in named}

    def shaped(values: Any, given: Mapping[str, Any]) -> list[float | None]:
        values = list(values)
        lengths = [len(ids) for ids in given["completion_ids"]]
        if len(values) != len(lengths):
            raise ValueError(f"{function_name(correct)} returned {len(values)} values for {len(lengths)} completions")
        return shape(values, lengths, given)

    def reward(**given: Any) -> list[float | None]:
        return shaped(correct(**own(given)), given)

    async def async_reward(**given: Any) -> list[float | None]:
        return shaped(await correct(**own(given)), given)

    wrapped: Any = async_reward if is_async_callable(correct) else reward
    wrapped.__name__ = name
    wrapped.__signature__ = _signature(signature, ("completion_ids", *columns))
    return group_reward(wrapped) if has_mark(correct, NEEDS_GROUP) else wrapped


def _signature(signature: inspect.Signature, added: Sequence[str]) -> inspect.Signature:
    """The parameters that can be filled by keyword, as the check before the run reads them, and those added."""
    kept = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    names = {parameter.name for parameter in kept}
    kept += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added if name not in names]
    rest = [parameter for parameter in signature.parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    return inspect.Signature([*kept, *rest])


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ConfigError(f"{name}={number} must be above 0")
