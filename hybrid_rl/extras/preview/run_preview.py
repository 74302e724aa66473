"""The preview of a run's data, by its configuration: `hybrid_rl.preview` and `hybrid-rl data`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_rl.config import TrainerConfig, load_config
from hybrid_rl.data.prompts import RESERVED_COLUMNS, PromptEncoder
from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.preview.dataset_preview import NoTokenizer, overlap, preview_datasets
from hybrid_rl.extras.preview.preview_text import Preview, RewardNeeds

SEVERAL = ("dict", "list", "tuple", "set", "ndarray")  # no single answer
# What is ready-made, and the columns that it reads.
READY_MADE = (
    RewardNeeds("exact_match", (("answer",),), is_known=True, refused=SEVERAL),
    RewardNeeds("gsm8k_reward", (("answer",),), is_known=True, refused=SEVERAL),
    RewardNeeds("math_reward", (("answer",), ("solution",)), is_known=True, refused=SEVERAL),
    RewardNeeds("reasoning_gym_reward", (("entry",),), is_known=True),
)


def preview(
    train_dataset: Any = None,
    eval_dataset: Any = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    reward_funcs: Any = None,
    config: TrainerConfig | Mapping[str, Any] | str | Path | None = None,
    num_shown: int = 2,
    **overrides: Any,
) -> Preview:
    """Look at data before a run: prompts as the model will see them, lengths, columns, what would be refused, prompts
    that occur twice, and those of evaluation that are trained on.

    Datasets, config and overrides are as in `Trainer`. model: a name or folder, of which only the tokenizer is read;
    without it (and without tokenizer=) prompts are shown as text, and lengths are in characters. num_shown: prompts.

    Raises ConfigError or DataError for what cannot be read at all.
    """
    settings = load_config(config, overrides)[0]
    data = settings.data
    train = data.train_path if train_dataset is None else train_dataset
    held_out = data.eval_path if eval_dataset is None else eval_dataset
    if train is None:
        raise ConfigError("there is no training data: pass train_dataset= or set data.train_path")
    if any(isinstance(path, str) and not path.strip() for path in (train, held_out)):
        raise ConfigError("the path of the data is empty, which would be the current folder; name a file, or . itself")
    path = settings.model.path if model is None else str(model)
    if tokenizer is None and path is None:
        tokenizer = NoTokenizer()
    else:
        # Imported here, so that a preview of text does not wait for it.
        from hybrid_rl.run.inputs import tokenizer_of, with_template

        tokenizer = tokenizer_of(str(path), settings) if tokenizer is None else with_template(tokenizer, settings)
    encoder = PromptEncoder(
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        overlong_prompts=data.overlong_prompts,
        chat_template_kwargs={} if isinstance(tokenizer, NoTokenizer) else data.chat_template_kwargs,
        prompt_column=data.prompt_column,
        system_prompt=data.system_prompt,
        apply_chat_template=data.apply_chat_template,
    )
    seen = preview_datasets(train, encoder, num_shown=num_shown)
    others = [] if held_out is None else preview_datasets(held_out, encoder, num_shown=0)
    shared = overlap(seen, others)
    rewards, share = _needs(reward_funcs, seen), settings.rewards.max_reward_failure_share
    return Preview(tuple(seen), tuple(others), tuple(shared), rewards, share)


def _needs(reward_funcs: Any, seen: Sequence[Any]) -> tuple[RewardNeeds, ...]:
    """Return what the given reward functions need; of the ready-made ones those whose columns are there, if none is
    given."""
    if reward_funcs is None:
        columns = [name for dataset in seen for name in dataset.columns]
        return tuple(reward for reward in READY_MADE if not reward.missing(columns))
    functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    return tuple(_needs_of(function) for function in functions)


def _needs_of(function: Any) -> RewardNeeds:
    """Return the parameters of a function that only columns can fill."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return RewardNeeds(name, ())
    is_ours = str(getattr(function, "__module__", "")).startswith("hybrid_rl.")
    ready = next((reward for reward in READY_MADE if is_ours and reward.name == name), None)
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind not in kinds
        and parameter.default is inspect.Parameter.empty
        and parameter.name not in RESERVED_COLUMNS
    )
    if ready is not None:
        return dataclasses.replace(ready, needs=(needed,)) if needed else ready
    return RewardNeeds(name, (needed,) if needed else ())
