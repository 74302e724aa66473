"""The configuration object of another library in the place of keywords."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybrid_rl.errors import ConfigError

ARGS = "args"  # TRL's name for it


def split_args(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `args=` gives, and the other keywords.

    args is TRL's GRPOConfig, or another dataclass that can be made without arguments: its fields that differ from a new
    one's count as given. Raises ConfigError for anything else.
    """
    rest = {name: value for name, value in keywords.items() if name != ARGS}
    given = keywords.get(ARGS)
    if given is None or isinstance(given, Mapping):
        return dict(given or {}), rest
    if not dataclasses.is_dataclass(given) or isinstance(given, type):
        raise ConfigError(
            f"args={given!r:.60} is a {type(given).__name__}; pass a GRPOConfig of TRL, keywords, or config= (a YAML "
            "file, a mapping or a TrainerConfig)"
        )
    default = _default_of(given)
    names = [item.name for item in dataclasses.fields(given) if item.init]
    return {name: getattr(given, name) for name in names if _differ(getattr(given, name), getattr(default, name))}, rest


def _default_of(given: Any) -> Any:
    """Make another one of its class, without arguments. On a machine without a GPU those of transformers can only be
    made with arguments that say so. Raises ConfigError if none can be made."""
    reason: Exception | None = None
    for arguments in ({}, {"use_cpu": True, "bf16": False}):
        try:
            return type(given)(**arguments)
        except (TypeError, ValueError) as error:
            reason = reason or error
    raise ConfigError(f"args: a {type(given).__name__} has no defaults ({reason}); pass keywords") from reason


def _differ(one: Any, other: Any) -> bool:
    try:
        return bool(one != other)
    except (TypeError, ValueError):  # arrays, say
        return one is not other
