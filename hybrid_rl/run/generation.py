"""Arguments of `Trainer.generate`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any
from weakref import WeakSet

from hybrid_rl.agents.agent_setup import AgentSetup
from hybrid_rl.agents.environments import ENVIRONMENT_COLUMN
from hybrid_rl.data.prompts import PROMPT_COLUMN, PromptEncoder, PromptRow, shorten
from hybrid_rl.engines.base import SamplingParams
from hybrid_rl.errors import ConfigError, DataError
from hybrid_rl.run.prepare import Run, check_stop_strings

logger = logging.getLogger("hybrid_rl")

WHOLE = frozenset({"num_generations", "max_tokens", "top_k", "seed"})
_hinted: WeakSet[PromptEncoder] = WeakSet()
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


def prompts_of(prompts: Any) -> list[Any]:
    """Return prompts as a list, a single text or row as one of it. Raises DataError for what holds no prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise DataError(f"generate({prompts!r:.80}): give a prompt or a list of them, texts or lists of chat messages")
    return list(prompts)


def generation_of(
    run: Run, prompts: Sequence[Any], given: Mapping[str, Any], stop_strings: Sequence[str] | str | None
) -> tuple[list[PromptRow], SamplingParams]:
    """Return the rows of a call without a data set, and their sampling parameters. prompts: of rows (dicts), or alone.
    given: fields of SamplingParams, None for those of training. Raises DataError for rows that what makes the
    trajectories cannot use."""
    chosen = {**given, "stop_strings": check_stop_strings(stop_strings, run.choice.tokenizer)}
    params = replace(run.train_params, **{name: value for name, value in chosen.items() if value is not None})
    given_rows = [dict(prompt) if isinstance(prompt, Mapping) else {PROMPT_COLUMN: prompt} for prompt in prompts]
    for place, row in enumerate(given_rows):
        _check_row(run.agents, row, place)
    encoder = run.data.encoder
    _hint_at_messages(run, given_rows)
    shown = [_shown(encoder, row, place) for place, row in enumerate(given_rows)]
    ids_of_rows = encoder.encode(shown, columns=given_rows)
    return [
        PromptRow(
            place,
            prompt,
            tuple(ids),
            {name: value for name, value in row.items() if name != PROMPT_COLUMN},
            PROMPT_COLUMN in row,
        )
        for place, (row, prompt, ids) in enumerate(zip(given_rows, shown, ids_of_rows, strict=True))
    ], params


def _shown(encoder: PromptEncoder, row: Mapping[str, Any], place: int) -> Any:
    """Return the prompt of a row as training would show it; one that has a message of the system as it is."""
    prompt = row.get(PROMPT_COLUMN, encoder.bare_prompt)
    if (
        isinstance(prompt, list | tuple)
        and prompt
        and isinstance(prompt[0], Mapping)
        and prompt[0].get("role") == "system"
    ):
        return prompt
    return encoder.dressed(prompt, place)


def _hint_at_messages(run: Run, rows: Sequence[Mapping[str, Any]]) -> None:
    """Say once that a text is completed as it is, if the run's own prompts are messages and it is not one of those that
    a chat template has rendered."""
    encoder, tokens = run.data.encoder, run.choice.tokenizer.all_special_tokens
    texts = [prompt for row in rows if isinstance(prompt := row.get(PROMPT_COLUMN), str)]
    if encoder in _hinted or encoder.apply_chat_template is not None or not (encoder.has_template and run.is_chat):
        return
    if bare := [text for text in texts if not any(token in text for token in tokens)]:
        _hinted.add(encoder)
        logger.warning(
            "generate: the prompt %s is completed as the text that it is, but this run trains on chat messages; to ask "
            'the policy as in training give [{"role": "user", "content": ...}]',
            shorten(bare[0]),
        )


def _check_row(agents: AgentSetup | None, row: Mapping[str, Any], place: int) -> None:
    """Raise DataError for a row without what its trajectory needs."""
    if PROMPT_COLUMN not in row and {"role", "content"} <= row.keys():
        raise DataError(
            f"generate: row {place} is a single message; a prompt is a list of messages: give a list of such lists"
        )
    if PROMPT_COLUMN not in row and (agents is None or not agents.makes_prompts):
        raise DataError(
            f"generate: row {place} has no {PROMPT_COLUMN!r}, but {shorten(sorted(row))}; only rows of an environment "
            "or an agent can do without"
        )
    if agents is None or not agents.has_tools:
        return
    if isinstance(row.get(PROMPT_COLUMN), str):
        raise DataError(
            f"generate: the prompt {shorten(row[PROMPT_COLUMN])} is text, but tools and environments need chat "
            'messages; give a list such as [{"role": "user", "content": "..."}]'
        )
    names = [kind.name for kind in agents.kinds]
    if agents.is_by_name and row.get(ENVIRONMENT_COLUMN) not in names:
        raise DataError(
            f"generate: row {place} has {ENVIRONMENT_COLUMN}={row.get(ENVIRONMENT_COLUMN)!r}; environment_factory has "
            f"{', '.join(map(repr, names))}: give rows such as {{{PROMPT_COLUMN!r}: [...], {ENVIRONMENT_COLUMN!r}: "
            f"{names[0]!r}}}, with the columns that its reset() takes"
        )
