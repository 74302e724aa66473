"""What an algorithm is made of: records. A frozen dataclass whose fields are its options (they become configuration
keys), whose class attributes say what it needs, and whose method calls pure functions."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

from torch import Tensor

from hybrid_rl.algos.inputs import AdvantageInputs, Advantages, LossInputs, PolicyLoss, WholeMiniBatch
from hybrid_rl.errors import ConfigError
from hybrid_rl.options import range_error


@dataclass(frozen=True)
class Record:
    """Base of all records. Its options are checked when it is made, by hand too: ConfigError for one of another type,
    or out of the range that its field declares. Whoever extends `__post_init__` calls this one."""

    def __post_init__(self) -> None:
        own: type = type(self)
        hints = _hints(own)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            problem = _type_error(value, hints[item.name]) or range_error(value, item.metadata)
            if problem:
                raise ConfigError(f"{type(self).__name__}: {item.name}={value!r} {problem}")

    @property
    def inert_options(self) -> Mapping[str, str]:
        """Options that do nothing beside the values that others have, each with the reason: a configuration that sets
        one is refused."""
        return {}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _type_error(value: Any, expected: Any) -> str:
    """What is wrong with the type of an option's value, empty where nothing is."""
    if typing.get_origin(expected) in (types.UnionType, typing.Union):
        problems = [_type_error(value, option) for option in typing.get_args(expected)]
        return "" if "" in problems else " or ".join(problems)
    if typing.get_origin(expected) is Literal:
        choices = typing.get_args(expected)
        return "" if value in choices else f"must be one of {', '.join(map(str, choices))}"
    kinds: dict[Any, type] = {int: Integral, float: Real, bool: bool, str: str, types.NoneType: types.NoneType}
    if expected not in kinds:
        return ""
    is_it = isinstance(value, kinds[expected]) and (expected is bool or not isinstance(value, bool))
    return "" if is_it else f"must be of type {expected.__name__}"


@dataclass(frozen=True)
class AdvantageEstimator(Record):
    """From rewards to advantages. Subclasses begin with a field `estimator`, their name.

    needs: "values", "logprobs", "ref_logprobs", "teacher_logprobs", "rollout_logprobs", "sum_pi_squared",
    "baseline_rewards", "function_rewards": columns of AdvantageInputs that it cannot do without; "demonstrations":
    samples are the dataset's own completions. min_generations: smallest group that it can compare. needs_rewards: False
    where it learns without any. takes_kl_rewards: False where a KL penalty in the rewards would spoil them (thresholds,
    steps), or would not be seen. tells_tokens_apart: True where the tokens of a completion may have different
    advantages whatever its rewards are. uses_step_rewards: True where rewards of single tokens, dense ones and those of
    a KL penalty, count at their tokens and not as their sum. needs_step_rewards: True where it is another estimator
    without any. is_never_negative: True where no advantage is, whatever the rewards are.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    min_generations: ClassVar[int] = 1
    needs_rewards: ClassVar[bool] = True
    takes_kl_rewards: ClassVar[bool] = True
    tells_tokens_apart: ClassVar[bool] = False
    uses_step_rewards: ClassVar[bool] = False
    needs_step_rewards: ClassVar[bool] = False
    is_never_negative: ClassVar[bool] = False

    def compute(self, inputs: AdvantageInputs) -> Advantages:
        """Advantages of all tokens, the same however samples lie on ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class PolicyObjective(Record):
    """From advantages to a loss per token. Subclasses begin with a field `objective`, their name.

    needs: "old_logprobs" (of the learner at the start of the training step, also where one update uses the batch),
    "log_probs" (the whole vocabulary), "old_top" (the best tokens of the old policy; `num_top` of them),
    "router_scores" (of a mixture of experts, then and now).
    initial_parameters: numbers that are learned beside the model, by Adam at parameter_learning_rate.
    corrects_rollout: True where the loss itself weighs what the engine sampled, so that no correction may be added.
    uses_old_logprobs: False where it compares with the engine's policy alone. uses_proximal: True where it compares
    engine, start of the step and policy. is_per_completion: True where a completion has one ratio, through which each
    of its tokens gets the mean of all their advantages: it takes estimators that give a completion one.
    min_generations: smallest group that it can do anything with.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    initial_parameters: ClassVar[tuple[float, ...]] = ()
    corrects_rollout: ClassVar[bool] = False
    uses_old_logprobs: ClassVar[bool] = True
    uses_proximal: ClassVar[bool] = False
    is_per_completion: ClassVar[bool] = False
    min_generations: ClassVar[int] = 1

    @property
    def parameter_learning_rate(self) -> float:
        """Learning rate of the numbers that are learned beside the model."""
        raise NotImplementedError

    def prepare(self, whole: WholeMiniBatch) -> Tensor | None:
        """What must be known of the whole mini-batch before it is cut, [T, ...] for its tokens, or None. Every rank
        computes the same from the same."""
        return None

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """The loss of each token; how tokens are weighted is not its business (masked.py)."""
        raise NotImplementedError
