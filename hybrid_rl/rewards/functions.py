"""Reward functions: their signatures, their names and their arguments.

The calling convention is TRL's (GRPOTrainer): keyword arguments only, every dataset column as a list.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybrid_rl.data.prompts import PROMPT_COLUMN, RESERVED_COLUMNS, Messages, Prompt, check_reserved_columns
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.marks import DENSE, NEEDS_GROUP, SHAPING, has_mark, is_async_callable, layers, unwrap_partial
from hybrid_rl.rewards.verl import VerlReward, adapted

if TYPE_CHECKING:
    from hybrid_rl.batch import SampleKey  # imports torch, which processes that only call functions do without

LOG_PARAMETERS = ("log_extra", "log_metric")
ENVIRONMENTS = "environments"  # the argument with the environments of agents


@dataclass(frozen=True)
class RewardInput:
    """One finished sample, ready to be scored."""

    key: SampleKey
    """Results are returned under it."""
    prompt: Prompt
    completion: str | Messages
    """The text; chat samples are wrapped for the function by `format_completion`. Of an agent all messages, its own and
    those of its tools."""
    completion_ids: list[int]
    columns: Mapping[str, Any]
    """The sample's dataset columns, without the prompt."""
    group: int = 0
    """Samples of one group are completions of one prompt; used if whole groups are scored."""
    environment: Any = None
    """The object that the sample acted on; functions that take `environments` get it."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What sources other than functions gave, by `GivenReward.name`: a number, None, or the exception instead."""
    policy_length: int | None = None
    """Tokens that the policy made in the whole trajectory; None = all of completion_ids."""
    opening: str = ""
    """What the prompt has opened of the completion, and is not in it: a thought, from <think> on."""

    @property
    def length(self) -> int:
        """Tokens that the policy made, without those of tools and environments."""
        return len(self.completion_ids) if self.policy_length is None else self.policy_length


@dataclass(frozen=True)
class RewardFunction:
    """One reward function and what its signature says."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    parameters: frozenset[str] | None
    """Names that it accepts; None if it has **kwargs and takes everything."""
    bound: frozenset[str]
    """Keywords that the user fixed with functools.partial; a column of that name does not override them."""
    is_dense: bool = False
    """Whether it may give a number per token (`dense_reward`)."""
    needs_group: bool = False
    """Whether it compares the samples of a group (`group_reward`)."""
    is_shaping: bool = False
    """Whether it does not say who is right (`shaping_reward`)."""

    def accepts(self, name: str) -> bool:
        """Whether the argument `name` is passed to this function."""
        return name not in self.bound and (self.parameters is None or name in self.parameters)

    @property
    def log_names(self) -> list[str]:
        """Those of `log_extra` and `log_metric` that it takes."""
        return [name for name in LOG_PARAMETERS if self.accepts(name)]

    def arguments(
        self,
        inputs: Sequence[RewardInput],
        trainer_state: Any,
        available_columns: Sequence[str] = (),
        *,
        has_environments: bool = False,
    ) -> dict[str, Any]:
        """Build the keyword arguments of one call over K samples, without the log functions.

        has_environments: whether `environments` is among them. Every list has length K. A column that a sample lacks is
        None there (as `datasets` fills it), so that a call looks the same whichever samples happen to finish together.
        Raises DataError if one has a reserved name.
        """
        columns = dict.fromkeys([*available_columns, *(name for sample in inputs for name in sample.columns)])
        columns.pop(PROMPT_COLUMN, None)  # `prompts` takes its place
        check_reserved_columns(columns, "a sample to score")
        # Every call gets copies: a function may change what it is given, but not the dataset or the tokens we train on.
        values: dict[str, Any] = {name: [_own(sample.columns.get(name)) for sample in inputs] for name in columns}
        values["prompts"] = [_own(sample.prompt) for sample in inputs]
        values["completions"] = [format_completion(sample.prompt, sample.completion) for sample in inputs]
        values["completion_ids"] = [list(sample.completion_ids) for sample in inputs]
        values["completion_lengths"] = [sample.length for sample in inputs]
        values["completion_openings"] = [sample.opening for sample in inputs]
        values["trainer_state"] = trainer_state
        if has_environments:
            values[ENVIRONMENTS] = [sample.environment for sample in inputs]
        return {name: value for name, value in values.items() if self.accepts(name)}


def _own(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, (list, dict)) else value


def format_completion(prompt: Prompt, completion: str | Messages) -> str | Messages:
    """Give a completion the form of its prompt: text for text, one assistant message for chat messages (as in TRL). The
    messages of an agent are copied."""
    if not isinstance(completion, str):
        return copy.deepcopy(completion)
    return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]


def function_name(function: Any) -> str:
    """Name a reward function in metrics: `__name__`, for a partial the inner name, for an object its class."""
    inner = unwrap_partial(function)
    name = getattr(inner, "__name__", None)
    return name if isinstance(name, str) else type(inner).__name__


def unique_names(names: Iterable[str]) -> list[str]:
    """Add _2, _3, ... to the second and later functions of one name."""
    unique: list[str] = []
    for name in names:
        numbered = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        unique.append(next(candidate for candidate in numbered if candidate not in unique))
    return unique


def inspect_function(
    function: Any, name: str, available_columns: Sequence[str] | None, *, has_environments: bool = False
) -> RewardFunction:
    """Read a signature. has_environments: whether there are environments to pass. Raises ConfigError for what cannot be
    called by keyword, and, if the columns are known, for parameters that nothing can fill."""
    if inspect.isclass(function):
        raise ConfigError(f"reward_funcs holds the class {function.__name__}; pass an instance of it")
    if not callable(function):
        raise ConfigError(f"reward_funcs holds {function!r}, which cannot be called; pass a function")
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward function {name!r} has no readable signature; wrap it in a `def`") from error
    if makes_a_function(function):
        raise ConfigError(
            f"reward function {name!r} makes a reward function and is none itself; call it and pass what it returns: "
            f"{name}()"
        )
    function = adapted(function, available_columns)
    parameters = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter
    takes_everything = any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    if unnamed := [p.name for p in parameters if p.kind is kinds.POSITIONAL_ONLY and p.default is kinds.empty]:
        raise ConfigError(
            f"reward function {name!r} has positional-only parameters {unnamed}; everything is passed by keyword"
        )
    if not named and not takes_everything:
        raise ConfigError(
            f"reward function {name!r} has no parameter that can be passed by keyword, so it would see no completion; "
            "write def f(completions, **kwargs)"
        )
    if available_columns is not None:
        columns = [column for column in available_columns if column != PROMPT_COLUMN]
        fillable = {*columns, *RESERVED_COLUMNS, *([ENVIRONMENTS] if has_environments else [])}
        for parameter in named:
            if parameter.default is kinds.empty and parameter.name not in fillable:
                near = difflib.get_close_matches(parameter.name, sorted(fillable), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                if parameter.name == ENVIRONMENTS:
                    hint = "; environments are there only with environment_factory="
                raise ConfigError(
                    f"reward function {name!r} requires the parameter {parameter.name!r}, but the dataset has no such "
                    f"column (columns: {', '.join(columns) or 'none'}; always passed: {', '.join(RESERVED_COLUMNS)})"
                    f"{hint}"
                )
    inner = unwrap_partial(function)
    return RewardFunction(
        name=name,
        function=function,
        is_async=is_async_callable(inner.function if isinstance(inner, VerlReward) else inner),
        parameters=None if takes_everything else frozenset(parameter.name for parameter in named),
        bound=bound_keywords(function),
        is_dense=has_mark(function, DENSE),
        needs_group=has_mark(function, NEEDS_GROUP),
        is_shaping=has_mark(function, SHAPING),
    )


def makes_a_function(function: Any) -> bool:
    """Whether a signature says that a function is returned, and asks for no completions."""
    signature = inspect.signature(function)
    returns = signature.return_annotation
    is_function = "Callable[" in (returns if isinstance(returns, str) else str(returns))
    return is_function and not {"completions", "completion_ids", "prompts"} & set(signature.parameters)


def bound_keywords(function: Any) -> frozenset[str]:
    """Return the keywords that partials have fixed already."""
    return frozenset(name for part in layers(function) if isinstance(part, functools.partial) for name in part.keywords)
