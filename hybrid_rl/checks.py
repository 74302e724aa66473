"""What an algorithm wants of the user beside a model and prompts: rewards, a teacher, demonstrations. Checked before
anything is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import TrainerConfig
from hybrid_rl.data import SizedSource, StreamSource
from hybrid_rl.errors import ConfigError
from hybrid_rl.models import load_tokenizer
from hybrid_rl.rewards import overlong_penalty, with_model_entries
from hybrid_rl.rollout import SamplingParams
from hybrid_rl.rollout.demonstrations import check_demonstrations
from hybrid_rl.workers import RewardSetup
from hybrid_rl.workers.setup import demonstration_encoder


def no_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Stands in where an algorithm learns without rewards and none is given: 0 for every completion."""
    return [0.0] * len(completions)


def check_rewards(
    reward_funcs: Any,
    config: TrainerConfig,
    columns: tuple[str, ...] | None,
    *,
    has_eval: bool,
    processing_classes: Any = None,
) -> tuple[RewardSetup, list[str]]:
    """The reward functions as the workers get them, and their names: the user's, and those that the configuration adds.
    columns: of the dataset, None = not known. Raises ConfigError for unusable ones."""
    given = [] if reward_funcs is None else reward_funcs
    functions = with_model_entries(given, processing_classes)
    if not functions and (config.advantage.needs_rewards or has_eval):
        raise ConfigError("there is no reward: pass reward_funcs= (a function or a list of functions)")
    added: list[Any] = [] if functions else [no_reward]
    if config.rewards.overlong_buffer is not None:
        added.append(overlong_penalty(config.rollout.max_completion_length, config.rewards.overlong_buffer))
    setup = RewardSetup([*functions, *added], columns, len(added))
    with contextlib.closing(setup.runner(config)) as runner:
        return setup, runner.names


def check_teacher(config: TrainerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError where a teacher is wanted but not named, or speaks in other tokens."""
    if "teacher_logprobs" not in config.advantage.needs:
        return
    path = config.advantage.teacher_path  # type: ignore[attr-defined]
    if path is None:
        raise ConfigError("distillation has no teacher: set advantage.teacher_path to its name or folder")
    theirs = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"teacher_path={path!r} has another vocabulary ({len(theirs)} tokens) than the model ({len(tokenizer)}): "
            "its logprobs are of other tokens; choose a teacher of the same family"
        )


def check_demonstrations_of(
    source: SizedSource | StreamSource,
    config: TrainerConfig,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
) -> None:
    """Raise DataError where the algorithm learns from the dataset's own completions and they cannot be used."""
    if "demonstrations" in config.advantage.needs:
        check_demonstrations(source, demonstration_encoder(tokenizer, config), params)
