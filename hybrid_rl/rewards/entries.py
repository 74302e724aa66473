"""The entries of `reward_funcs`: functions, reward models and judges, and rewards that samples bring along."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from hybrid_rl.data.prompts import check_reserved_columns
from hybrid_rl.errors import ConfigError
from hybrid_rl.rewards.calling import CallLog, CallOutcome, check_values
from hybrid_rl.rewards.engine_judge import EngineJudge
from hybrid_rl.rewards.functions import RewardFunction, RewardInput, function_name, inspect_function, unique_names
from hybrid_rl.rewards.marks import SHAPING, has_mark, unwrap_partial


@dataclass(frozen=True)
class RewardModelEntry:
    """A reward model in the place of a function.

    name: in metrics. model: a folder or hub name, a module, or whatever else the workers build it from. tokenizer: its
    own, or its name or folder; None: loaded with the model.
    """

    name: str
    model: Any
    tokenizer: Any = None


@dataclass(frozen=True)
class GivenReward:
    """A reward that samples bring along (`RewardInput.given`), in the place of a function: what an environment's
    get_reward or an agent returned. name: of the source, and in metrics. is_dense: whether it may be a number per
    token, as agents give, and environments do not."""

    name: str
    is_dense: bool = False

    def silence(self, asked: Collection[str]) -> str:
        """Say that it gave a sample nothing; "" if it was not asked. asked: names of the environments that were."""
        if self.is_dense:
            return "the agent (or rollout_func) gave no reward: return a number, or call trajectory.add_reward(number)"
        return f"get_reward() of {self.name} returned None" if self.name in asked else ""

    def outcome(self, inputs: Sequence[RewardInput]) -> CallOutcome:
        """Return the values of these samples, as a function that returns them would."""
        return check_values([sample.given.get(self.name) for sample in inputs], CallLog(len(inputs)))


@dataclass(frozen=True)
class RewardList:
    """reward_funcs, sorted by kind; keys are places in reward_funcs. names: of all of them, no two alike."""

    names: list[str]
    functions: dict[int, RewardFunction]
    models: dict[int, RewardModelEntry]
    judges: dict[int, EngineJudge]
    given: dict[int, GivenReward] = field(default_factory=dict)

    @property
    def late(self) -> list[int]:
        """Places of the entries that score samples only when all are finished: reward models and judges."""
        return sorted([*self.models, *self.judges])

    @property
    def dense(self) -> list[int]:
        """Places of the entries that may give a number per token."""
        return [place for place, entry in (self.functions | self.given).items() if entry.is_dense]

    @property
    def shaping(self) -> list[int]:
        """Places of the entries that are marked as `shaping_reward`."""
        functions = [place for place, function in self.functions.items() if function.is_shaping]
        return functions + [place for place, judge in self.judges.items() if has_mark(judge, SHAPING)]

    def max_length(self, sample_length: int) -> int:
        """Tokens of the longest sequence for the engine: a sample, or a judge's question with its answer."""
        return max([sample_length, *(judge.max_length(sample_length) for judge in self.judges.values())])

    @classmethod
    def of(
        cls, reward_funcs: Any, available_columns: Sequence[str] | None = None, *, has_environments: bool = False
    ) -> RewardList:
        """Sort one entry or a list of them. available_columns: of the dataset, None if they are not known.
        has_environments: whether functions can be given `environments`.

        Raises ConfigError for an unusable entry, for none, and for functions with parameters that nothing can fill,
        DataError for a column that would hide what the library passes to functions.
        """
        entries = with_model_entries(reward_funcs)
        if not entries:
            raise ConfigError("reward_funcs is empty; pass at least one function")
        check_reserved_columns(available_columns or (), "the dataset")
        names = unique_names(
            e.name if isinstance(e, RewardModelEntry | GivenReward) else function_name(e) for e in entries
        )
        reward_list = cls(names, {}, {}, {})
        for place, entry in enumerate(entries):
            if isinstance(entry, RewardModelEntry):
                reward_list.models[place] = entry
            elif isinstance(entry, EngineJudge):
                reward_list.judges[place] = entry
            elif isinstance(entry, GivenReward):
                reward_list.given[place] = entry
            else:
                reward_list.functions[place] = inspect_function(
                    entry, names[place], available_columns, has_environments=has_environments
                )
        return reward_list


def with_model_entries(reward_funcs: Any, processing_classes: Any = None) -> list[Any]:
    """Make reward_funcs a list in which every model is a RewardModelEntry.

    processing_classes: TRL's reward_processing_classes: tokenizers of the reward models, one for each entry of
    reward_funcs (None for functions, and for a tokenizer that is to be loaded with its model), or a single one.
    Raises ConfigError for another number of them and for one given for a function.
    """
    entries = [as_entry(entry) for entry in as_list(reward_funcs)]
    if processing_classes is None:
        return entries
    classes = as_list(processing_classes)
    if len(classes) != len(entries):
        raise ConfigError(
            f"{len(classes)} reward_processing_classes for {len(entries)} reward_funcs; give one for each, None for "
            f"a function"
        )
    for place, (entry, tokenizer) in enumerate(zip(entries, classes, strict=True)):
        if isinstance(entry, RewardModelEntry):
            entries[place] = replace(entry, tokenizer=tokenizer or entry.tokenizer)
        elif tokenizer is not None:
            raise ConfigError(
                f"reward_processing_classes has a {type(tokenizer).__name__} for {function_name(entry)!r}, which is a "
                f"function; put None in its place"
            )
    return entries


def as_list(given: Any) -> list[Any]:
    """Return a list or tuple as a list, anything else as the only entry of one."""
    return list(given) if isinstance(given, list | tuple) else [given]


def as_entry(given: Any) -> Any:
    """Make a string or a module a RewardModelEntry, named by the last part of its path (as in TRL) or by its class."""
    if isinstance(given, str):
        return RewardModelEntry(PurePath(given).name or given, given)
    torch = sys.modules.get("torch")  # a module can only exist once torch is imported
    if torch is None or not isinstance(unwrap_partial(given), torch.nn.Module):
        return given
    path = getattr(getattr(given, "config", None), "name_or_path", None)
    return RewardModelEntry(PurePath(path or "").name or type(given).__name__, given)
