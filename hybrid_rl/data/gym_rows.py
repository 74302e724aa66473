"""Problems of reasoning-gym by name: `reasoning_gym:chain_sum`; with arguments `reasoning_gym:chain_sum?size=200`, or
as a mapping {"reasoning_gym": "chain_sum", "size": 200}."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from hybrid_rl.data.formats import ANSWER_COLUMN, Format
from hybrid_rl.data.prompts import shorten
from hybrid_rl.errors import ConfigError, DataError

PREFIX = "reasoning_gym"
ENTRY_COLUMN = "entry"  # what the scorer of a task needs of a problem
DEFAULTS = {"size": 500, "seed": 42}  # without a seed reasoning-gym would make other problems at every start


def is_gym(dataset: Any) -> bool:
    """Whether a dataset is given as a task of reasoning-gym."""
    return dataset.startswith(f"{PREFIX}:") if isinstance(dataset, str) else PREFIX in dataset


def gym_rows(dataset: str | Mapping[str, Any]) -> tuple[list[dict[str, Any]], Format]:
    """Make the problems of a task: rows with question, answer and entry, and how they are read.

    Raises ConfigError if reasoning-gym is not installed, DataError for an unknown task or argument.
    """
    name, arguments = _task(dataset)
    library = reasoning_gym(f"the dataset {shorten(dataset)}")
    known = vars(importlib.import_module("reasoning_gym.factory"))["DATASETS"]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise DataError(
            f"reasoning-gym has no task {name!r}; "
            + (f"did you mean {', '.join(near)}?" if near else "reasoning_gym.factory.DATASETS has all names")
        )
    try:
        problems = library.create_dataset(name, **arguments)
        entries = [problems[place] for place in range(len(problems))]
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise DataError(f"reasoning-gym cannot make {name!r} with {arguments}: {error}; correct them") from error
    rows = []
    for entry in entries:
        entry["metadata"] = {**entry.get("metadata", {}), "source_dataset": name}
        rows.append({"question": entry["question"], ANSWER_COLUMN: entry[ANSWER_COLUMN], ENTRY_COLUMN: entry})
    said = f"{len(rows)} problems of {name} ({', '.join(f'{key}={value}' for key, value in arguments.items())})"
    return rows, Format("reasoning-gym", "question", ANSWER_COLUMN, lambda value: value, said, is_question=True)


def reasoning_gym(what: str) -> Any:
    """Import reasoning-gym. what: needs it. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(f"{what} needs reasoning-gym, which is not installed: pip install reasoning-gym") from error


def _task(dataset: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a task."""
    if isinstance(dataset, Mapping):
        settings = {str(key): value for key, value in dataset.items()}
        return str(settings.pop(PREFIX)), {**DEFAULTS, **settings}
    name, _, query = dataset.removeprefix(f"{PREFIX}:").partition("?")
    arguments: dict[str, Any] = dict(DEFAULTS)
    for key, text in parse_qsl(query, keep_blank_values=True):
        try:
            arguments[key] = json.loads(text)
        except ValueError:
            arguments[key] = text
    return name, arguments
