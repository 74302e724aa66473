"""Sets of prompts that the policy is evaluated on, and what counts as right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_rl.config import TrainerConfig
from hybrid_rl.data.gym_rows import is_gym
from hybrid_rl.data.mixture import MOST_LETTERS
from hybrid_rl.data.prompts import PROMPT_COLUMN, PromptEncoder, PromptRow
from hybrid_rl.data.source import SizedSource, load_source
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.rollout.successes import Grades, SuccessRule
from hybrid_rl.workers.setup import RewardSetup

SINGLE = ""  # the name of a set that has none
# Beginnings of metrics after eval/, which a set of that name would be mistaken for.
TAKEN = frozenset({"agent", "agents", "completions", "judge", "log_metric", "rewards", "tools"})

Sets = Mapping[str, SizedSource]


def load_sets(given: Any, encoder: PromptEncoder) -> dict[str, SizedSource]:
    """Return evaluation sets by name from a dataset, which has the name "", or from a mapping of names to datasets.

    Raises DataError for a dataset that is empty or cannot be used, and ConfigError for a stream and for a bad name.
    """
    if not are_sets(given):
        return {SINGLE: _sized(given, SINGLE, encoder)}
    if not given:
        raise DataError("eval_dataset is an empty mapping; give at least one set, or leave it out")
    for name in given:
        _check_name(name)
    return {name: _sized(dataset, name, encoder) for name, dataset in given.items()}


def are_sets(given: Any) -> bool:
    """Whether what was given as evaluation data are datasets by name, and not a single one."""
    return isinstance(given, Mapping) and PROMPT_COLUMN not in given and not is_gym(given)


def _sized(dataset: Any, name: str, encoder: PromptEncoder) -> SizedSource:
    which = f"eval_dataset[{name!r}]" if name else "eval_dataset"
    try:
        source = load_source(dataset, encoder)
    except DataError as error:
        raise DataError(f"{which}: {error}") from error if name else error
    if not isinstance(source, SizedSource):
        raise ConfigError(f"{which} is a stream; give a dataset of fixed size, so that evaluations can be compared")
    return source


def _check_name(name: Any) -> None:
    """Raise ConfigError for a name that metrics cannot have in the place of a set."""
    is_name = isinstance(name, str) and name.replace("-", "_").replace(".", "_").isidentifier() and name[0].isalpha()
    if not is_name or len(name) > MOST_LETTERS:
        raise ConfigError(
            f"eval_dataset has a set named {name!r:.80}, but metrics are named eval/<set>/accuracy: use letters, "
            f"digits and . _ - only, begin with a letter, and take at most {MOST_LETTERS}"
        )
    if name in TAKEN:
        raise ConfigError(f"eval_dataset has a set named {name!r}, which other metrics begin with; choose another name")


def rows_of(sets: Sets) -> dict[str, list[PromptRow]]:
    """Return the prompts of every set."""
    return {name: [source[index] for index in range(len(source))] for name, source in sets.items()}


def success_rule(config: TrainerConfig, rewards: RewardSetup, grades: Grades | None = None) -> SuccessRule | None:
    """Return what counts as a success. grades: of the run. None if the user has no reward functions. Raises ConfigError
    for a name that none of them has."""
    names, asked = rewards.entries.names, config.eval.success_functions
    own = names[: len(names) - rewards.num_added]
    if unknown := [name for name in asked if name not in own]:
        raise ConfigError(
            f"success_functions names {', '.join(map(repr, unknown))}, but the reward functions are "
            f"{', '.join(map(repr, own)) or 'none'}; give their names"
        )
    if not own:
        return None
    return SuccessRule(tuple(own.index(name) for name in asked) or (0,), config.eval.success_reward, grades)
