"""The configuration keys of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybrid_rl.algos.options import key


@dataclass(frozen=True)
class DataConfig:
    """The sources of prompts, and how they become what the model sees."""

    train_path: str | dict[str, Any] | None = key(
        None,
        "JSONL, parquet, a saved dataset, a folder of JSON files or reasoning_gym:TASK; or several by name; None if "
        "train_dataset is passed to Trainer",
    )
    eval_path: str | dict[str, Any] | None = key(None, "the same for evaluation")
    dataset_weights: dict[str, Any] = key(
        {}, "shares of several training datasets in the draws, by name; empty = by their sizes"
    )
    prompts_per_step: int = key(16, "prompts of one training step over all ranks, never rescaled", minimum=1)
    shuffle: bool | None = key(None, "shuffle every epoch; None = yes for sized data, no for streams")
    curriculum_floor: float | None = key(
        None,
        "draw prompts by their measured success rate p, in proportion to 4p(1-p) but at least to this; None = all "
        "equally often",
        above=0,
        maximum=1,
    )
    prompt_column: str | None = key(
        None, "the column with the prompt; None = prompt, or as in a published format that is recognised"
    )
    system_prompt: str | None = key(None, "begins every prompt as the message of the system")
    apply_chat_template: bool | None = key(
        None,
        "make text prompts the message of a user; None = only the questions of recognised formats, if the tokenizer "
        "has a chat template",
    )
    chat_template_path: str | None = key(
        None, "a Jinja file that takes the place of the tokenizer's chat template, in checkpoints too"
    )
    chat_template_kwargs: dict[str, Any] = key({}, "passed to the tokenizer's chat template")
    max_prompt_length: int | None = key(None, "longest prompt in tokens; None = the model's limit", minimum=1)
    overlong_prompts: Literal["error", "drop", "truncate"] = key(
        "error", "prompts over the limit: stop before work starts, drop and count, or keep their last tokens"
    )
