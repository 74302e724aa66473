"""Layers that adapters are asked for, looked up in the module. peft ignores names that it does not find."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.errors import ConfigError

NUM_SHOWN = 12  # names in an error


def check_names(module: nn.Module, settings: Any) -> None:
    """Raise ConfigError for a name in a peft LoraConfig that stands for nothing in a module without adapters."""
    modules = [name for name, _ in module.named_modules() if name]
    parameters = [name for name, _ in module.named_parameters()]
    fused = [name for name, parameter in module.named_parameters() if parameter.dim() > 2]
    single = [name for name, child in module.named_modules() if "." not in name.removeprefix("model.") and name]
    head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None  # cannot have an adapter
    linear = [name for name, child in module.named_modules() if isinstance(child, nn.Linear) and child is not head]
    if settings.target_modules != "all-linear":
        _check("target_modules", settings.target_modules, modules, linear)
    _check("exclude_modules", settings.exclude_modules, [*modules, *fused], linear)
    _check("modules_to_save", settings.modules_to_save, modules, single)
    _check("target_parameters", settings.target_parameters, parameters, fused)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern, value in getattr(settings, key).items():
            is_rank = key == "rank_pattern"
            is_number = isinstance(value, int if is_rank else int | float) and not isinstance(value, bool)
            if not is_number or value <= 0:
                raise ConfigError(
                    f"lora.{key}: {pattern}={value!r} must be a {'whole ' if is_rank else ''}number above 0"
                )
            _check(key, rf"(.*\.)?({pattern})", [*modules, *parameters], linear, shown=pattern)


def why_refused(error: Exception) -> str:
    """Return why peft refuses adapters, in words of the keys if they are known."""
    message = str(error)
    if "ParamWrapper" in message and "use_dora" in message:
        return (
            "use_dora is not supported for routers and fused experts, which target_modules=all-linear has too in this "
            "model; leave use_dora out, or name linear layers, such as target_modules=[q_proj,v_proj]"
        )
    if "is not supported" in message and message.startswith("Target module "):
        kind = message.removeprefix("Target module ").partition("(")[0]
        return f"target_modules has a layer of type {kind}: only linear layers can have adapters; name those inside it"
    if "specify `target_modules`" in message:
        return "peft knows no layers for this architecture; set target_modules=all-linear, or name them"
    if "No modules were targeted" in message or "All modules were excluded" in message:
        return "no layer is left for an adapter: exclude_modules or modules_to_save has all that target_modules names"
    return message


def check_patterns(adapted: nn.Module, patterns: Mapping[str, Iterable[str]]) -> None:
    """Raise ConfigError for a pattern of ranks or scales that no adapter of a module has. patterns: by key."""
    names = []
    for name, child in adapted.named_modules():
        if hasattr(child, "lora_A"):
            layer = name.replace(".base_layer", "")  # experts have a wrapper in a wrapper
            parameter = getattr(child, "parameter_name", None)
            names += [layer] if parameter is None else [layer, f"{layer}.{parameter}"]
    for key, key_patterns in patterns.items():
        for pattern in key_patterns:
            if not any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
                raise ConfigError(f"lora.{key}: no layer of {pattern!r} has an adapter; {_known(names)}")


def not_excluded(parameters: Iterable[str], wanted: Iterable[str], excluded: Iterable[str] | str) -> list[str]:
    """Return what of a peft config's target_parameters is left if exclude_modules holds for them too.

    parameters: names of all that the module has without adapters; wanted: ends of names. An end of which all are left
    stays; otherwise the whole names of those that are.
    """
    targets: list[str] = []
    for end in sorted(wanted):
        names = [name for name in parameters if f".{name}".endswith(f".{end}")]
        left = [name for name in names if not _is_excluded(name, excluded)]
        targets += [end] if left == names else left
    return targets


def _is_excluded(parameter: str, excluded: Iterable[str] | str) -> bool:
    """Return whether a parameter or the module that it belongs to is excluded."""
    names = (parameter, parameter.rpartition(".")[0])
    if isinstance(excluded, str):
        return any(re.fullmatch(excluded, name) for name in names)
    return any(f".{name}".endswith(f".{end}") for name in names for end in excluded)


def _check(
    key: str, wanted: Iterable[str] | str | None, names: Sequence[str], others: Sequence[str], shown: str = ""
) -> None:
    """Look names up. names: those that may be meant; others: those that an error shows, by their last words."""
    if isinstance(wanted, str):
        try:
            is_found = any(re.fullmatch(wanted, name) for name in names)
        except re.error as error:
            meant = f"; .{wanted} is meant" if wanted.startswith("*") else ""
            raise ConfigError(f"lora.{key}={shown or wanted!r} is no regular expression: {error}{meant}") from error
        if not is_found:
            form = (
                "; all-linear is meant"
                if wanted.replace("_", "-") == "all-linear"
                else ""
                if shown
                else f". A text is a regular expression of whole names ({others[0]}); give ends of names as a list, "
                f"[{wanted}]"
            )
            raise ConfigError(f"lora.{key}={shown or wanted!r} matches nothing in this model{form}; {_known(others)}")
        return
    missing = [end for end in sorted(wanted or []) if not any(f".{name}".endswith(f".{end}") for name in names)]
    if missing:
        raise ConfigError(
            f"lora.{key}: {', '.join(missing)} is not the end of any name in this model; {_known(others)}"
        )


def _known(names: Sequence[str]) -> str:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    ends = [end for end in ends if not end.isdecimal()]
    if not ends:
        return "it has no experts that are fused"
    return f"there are {', '.join(ends[:NUM_SHOWN])}{', ...' * (len(ends) > NUM_SHOWN)}"
