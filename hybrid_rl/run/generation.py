"""Arguments of `Trainer.generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from hybrid_rl.data.prompts import PromptRow
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import ConfigError
from hybrid_rl.run.prepare import Run, check_stop_strings

WHOLE = frozenset({"num_generations", "max_tokens", "top_k", "seed"})
COUNTS = ("num_generations", "max_completion_length")


def check_numbers(num_generations: int, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that are not numbers, or not whole numbers if they must be. given: fields of
    SamplingParams, which knows their ranges; None for those of training."""
    if num_generations is None:
        raise ConfigError("num_generations=None: give the number of completions per prompt")
    for name, value in {"num_generations": num_generations, **given}.items():
        kind = Integral if name in WHOLE else Real
        shown = "max_completion_length" if name == "max_tokens" else name
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise ConfigError(f"{shown}={value!r} must be a {'whole ' if kind is Integral else ''}number")
        if shown in COUNTS and value is not None and value < 1:
            raise ConfigError(f"{shown}={value!r} must be at least 1")


def generation_of(
    run: Run, prompts: Sequence[Any], given: Mapping[str, Any], stop_strings: Sequence[str] | str | None
) -> tuple[list[PromptRow], SamplingParams]:
    """Return the rows of prompts without a data set, and their sampling parameters. given: fields of SamplingParams,
    None for those of training."""
    chosen = {**given, "stop_strings": check_stop_strings(stop_strings, run.choice.tokenizer)}
    params = replace(run.train_params, **{name: value for name, value in chosen.items() if value is not None})
    encoded = run.data.encoder.encode(prompts)
    return [PromptRow(i, p, tuple(ids), {}) for i, (p, ids) in enumerate(zip(prompts, encoded, strict=True))], params
