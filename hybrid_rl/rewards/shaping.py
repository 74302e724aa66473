"""Ready-made rewards for length and form. Lengths are in tokens of the completion, the final end-of-sequence token
counted. Of agents a length is that of what the policy wrote, in the whole trajectory; where a limit is approached it is
what the limit counts, all tokens after the prompt.

Each factory makes a function for `reward_funcs`. Length rewards wrap a function that says what is correct: they call it
with the arguments that it takes, and a sample is correct if it gets at least `success`; a sample that gets None stays
None.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_rl.data.prompts import Messages
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.completions import completion_texts
from hybrid_rl.rewards.functions import function_name, inspect_function
from hybrid_rl.rewards.marks import group_reward, shaping_reward

RewardFunctionLike = Callable[..., Any]
# Takes, for each sample of a call that gets a reward, a tuple of the wrapped function's value, the length, and the
# columns that were asked for. Gives the rewards.
Shape = Callable[[Sequence[Any]], Sequence[float]]

THINK_ANSWER = r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def overlong_penalty(max_completion_length: int, buffer: int) -> RewardFunctionLike:
    """Make DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to max_completion_length - buffer tokens,
    then falling in a straight line to -1 at max_completion_length, and -1 beyond. Add it to a reward of correctness.
    All tokens after the prompt count, those of tools and environments too: it warns of the limit, which counts them.
    """
    if not 0 < buffer <= max_completion_length:
        raise ConfigError(f"buffer={buffer} must be from 1 to max_completion_length={max_completion_length}")

    @shaping_reward
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
    """Make the cosine length reward (arXiv:2502.03373, section 4): with L = max_completion_length a completion of t
    tokens gets

        longest + (shortest - longest) (1 + cos(pi t / L)) / 2

    with the two values for correct or for wrong ones, and `exceeded` from L tokens on. Defaults are the paper's. It
    replaces the reward of correctness. t counts tokens of the policy; the limit that is exceeded counts those of tools
    and environments as well.

    The paper says R(t = 0) = r_0 and R(t = L) = r_L, but passes them as CosFn's minimum and maximum, which would swap
    them; this follows what it says.
    """
    if not max_completion_length > 0:
        raise ConfigError(f"max_completion_length={max_completion_length} must be above 0")

    def rule(value: float, length: int, ids: Sequence[int]) -> float:
        if len(ids) >= max_completion_length:
            return exceeded
        pair = (correct_shortest, correct_longest) if value >= success else (wrong_shortest, wrong_longest)
        share = (1 + math.cos(math.pi * length / max_completion_length)) / 2
        return pair[1] + (pair[0] - pair[1]) * share

    return _wrap(correct, "cosine_reward", lambda samples: [rule(*sample) for sample in samples], "completion_ids")


def kimi_length_reward(correct: RewardFunctionLike, *, weight: float = 1.0, success: float = 1.0) -> RewardFunctionLike:
    """Add Kimi k1.5's length penalty (arXiv:2501.12599, section 2.3.3) to the reward of correctness: within the group
    of a prompt, with lambda = 0.5 - (length - min) / (max - min), a correct completion gets lambda and a wrong one
    min(0, lambda); 0 if all have the same length. Needs score_by=group.

    weight: of this part; the paper has one and warms it up, but gives no number. Samples to which the wrapped function
    does not apply count neither for min nor for max (the paper has none).
    """

    def shape(samples: Sequence[tuple[float, int]]) -> list[float]:
        lengths = [length for _, length in samples]
        shortest, longest = min(lengths, default=0), max(lengths, default=0)
        rewards = []
        for value, length in samples:
            part = 0.0 if longest == shortest else 0.5 - (length - shortest) / (longest - shortest)
            rewards.append(value + weight * (part if value >= success else min(0.0, part)))
        return rewards

    return group_reward(_wrap(correct, "kimi_length_reward", shape))


def lcpo_exact(
    correct: RewardFunctionLike, *, alpha: float = 0.0003, success: float = 1.0, column: str = "target_length"
) -> RewardFunctionLike:
    """Make L1's LCPO-Exact (arXiv:2503.04697, eq. 1): [correct] - alpha |target - length|. The target is in the prompt
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
    """Make L1's LCPO-Max (arXiv:2503.04697, eq. 2): [correct] clip(alpha (target - length) + delta, 0, 1), for a target
    that is a limit. delta keeps a correct answer that is a little over it above a wrong one. alpha, delta: the paper's.
    """
    return _targeted(
        correct, "lcpo_max", column, success, lambda good, left: good * min(max(alpha * left + delta, 0.0), 1.0)
    )


def format_reward(pattern: str = THINK_ANSWER) -> RewardFunctionLike:
    """Make a reward: 1 if the whole completion matches a regular expression ("." takes newlines too), else 0. The
    default expects one <think>...</think>, then one <answer>...</answer>, with only white space around them."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r} is not a regular expression: {error}") from error

    def format_reward(
        completions: Sequence[str | Messages], completion_openings: Sequence[str] | None = None
    ) -> list[float]:
        texts = completion_texts(completions, completion_openings)
        return [float(compiled.fullmatch(text) is not None) for text in texts]

    return format_reward


def tag_count_reward(tags: Sequence[str] = TAGS) -> RewardFunctionLike:
    """Make a reward: the share of these tags that a completion holds exactly once, as partial credit for its form."""
    if isinstance(tags, str) or not tags or not all(tags):
        raise ConfigError(f"tags={tags!r}; give a list of tags, none of them empty")
    wanted = tuple(tags)

    def tag_count_reward(
        completions: Sequence[str | Messages], completion_openings: Sequence[str] | None = None
    ) -> list[float]:
        texts = completion_texts(completions, completion_openings)
        return [sum(text.count(tag) == 1 for tag in wanted) / len(wanted) for text in texts]

    return tag_count_reward


def _targeted(
    correct: RewardFunctionLike, name: str, column: str, success: float, rule: Callable[[float, float], float]
) -> RewardFunctionLike:
    """rule: takes 1.0 if correct or else 0.0, and the tokens left to the target."""

    def shape(samples: Sequence[tuple[float, int, Any]]) -> list[float]:
        return [rule(float(value >= success), target - length) for value, length, target in samples]

    return _wrap(correct, name, shape, column)


def _wrap(correct: RewardFunctionLike, name: str, shape: Shape, *columns: str) -> RewardFunctionLike:
    """Make a reward function that takes the arguments of `correct`, completion_lengths and the columns; async if that
    is.

    A sample without a value, or without an entry in one of the columns, gets None, and is not shown to `shape`.
    """
    if not callable(correct):
        raise ConfigError(f"{name} must wrap a reward function that scores correctness; {correct!r} is not one")
    spec = inspect_function(correct, function_name(correct), None)

    def own(given: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in given.items() if spec.accepts(key)}

    def shaped(values: Any, given: Mapping[str, Any]) -> list[float | None]:
        values, lengths = list(values), given["completion_lengths"]
        if len(values) != len(lengths):
            values_text = f"{len(values)} value{'s' * (len(values) != 1)}"
            raise ValueError(f"{spec.name} returned {values_text} for {len(lengths)} completions")
        rows = list(zip(values, lengths, *(given[column] for column in columns), strict=True))
        applies = [all(entry is not None for entry in row) for row in rows]
        rewards = iter(shape(list(itertools.compress(rows, applies))))
        return [next(rewards) if counts else None for counts in applies]

    def reward(**given: Any) -> list[float | None]:
        return shaped(correct(**own(given)), given)

    async def async_reward(**given: Any) -> list[float | None]:
        return shaped(await correct(**own(given)), given)

    wrapped: Any = async_reward if spec.is_async else reward
    wrapped.__name__ = name
    wrapped.__signature__ = _signature(inspect.signature(correct), ("completion_lengths", *columns))
    return group_reward(wrapped) if spec.needs_group else wrapped


def _signature(signature: inspect.Signature, added: Sequence[str]) -> inspect.Signature:
    """Keep the parameters that can be filled by keyword, as the check before the run reads them, and add others."""
    kept = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    names = {parameter.name for parameter in kept}
    kept += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added if name not in names]
    rest = [parameter for parameter in signature.parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    return inspect.Signature([*kept, *rest])
