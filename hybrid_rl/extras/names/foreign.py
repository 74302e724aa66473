"""The configuration object of another library in the place of keywords."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybrid_rl.errors import ConfigError
from hybrid_rl.extras.names.trl_args import Translation, differ, plain, translate

ARGS = "args"  # TRL's name for it


# A field by which TRL's configuration is known, whatever its class is called.
OF_TRL = "per_device_train_batch_size"
WITHOUT_GPU = {"use_cpu": True, "bf16": False}  # arguments without which no configuration can be made there


def split_args(keywords: Mapping[str, Any]) -> tuple[Translation, dict[str, Any]]:
    """Return what `args=` gives, and the other keywords.

    args is TRL's GRPOConfig, every field of which counts (`translate`), or another dataclass that can be made without
    arguments: its fields that differ from a new one's count as given. Raises ConfigError for anything else.
    """
    rest = {name: value for name, value in keywords.items() if name != ARGS}
    args = keywords.get(ARGS)
    if args is None or isinstance(args, Mapping):
        return Translation(dict(args or {})), rest
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        raise ConfigError(
            f"args={args!r:.60} is of type {type(args).__name__}; pass a GRPOConfig of TRL, keywords, or config= "
            "(a YAML file, a mapping or a TrainerConfig)"
        )
    names = [item.name for item in dataclasses.fields(args) if item.init]
    default = _default_of(args)
    fields, defaults = ({name: getattr(instance, name) for name in names} for instance in (args, default))
    if OF_TRL in fields:
        return translate(fields, defaults | _own_defaults(args), rest), rest
    return Translation({name: plain(fields[name]) for name in names if differ(fields[name], defaults[name])}), rest


def _own_defaults(given: Any) -> dict[str, Any]:
    """Return TRL's defaults of the fields that `_default_of` may have to set."""
    fixed = {item.name: item for item in dataclasses.fields(given)}
    defaults: dict[str, Any] = {}
    for name in WITHOUT_GPU.keys() & fixed.keys():
        item = fixed[name]
        defaults[name] = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    if defaults.get("bf16", "") is None:  # filled in
        defaults["bf16"] = True
    return defaults


def _default_of(given: Any) -> Any:
    """Make another one of its class, without arguments. On a machine without a GPU those of transformers can only be
    made with arguments that say so. Raises ConfigError if none can be made."""
    reason: Exception | None = None
    for arguments in ({}, WITHOUT_GPU):
        try:
            return type(given)(**arguments)
        except (TypeError, ValueError) as error:
            reason = reason or error
    raise ConfigError(f"args: a {type(given).__name__} has no defaults ({reason}); pass keywords") from reason
