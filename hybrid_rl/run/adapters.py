"""Adapters that a user passes, a LoraConfig or a PeftModel; and the check of what they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import ConfigError
from hybrid_rl.models.lora.plain import ADAPTER, is_adapted
from hybrid_rl.models.lora.settings import keys_of, peft_config_of
from hybrid_rl.models.lora.sizes import AdapterSize, adapter_size


def with_adapters(model: Any, peft_config: Any, overrides: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model without peft's outer class, and the overrides with the keys of the adapters, which the run
    folder records. Raises ConfigError if they are given twice, or cannot be trained."""
    inner, config = _of_peft_model(model)
    if config is not None and peft_config is not None:
        raise ConfigError("the model is a PeftModel with adapters of its own; leave peft_config out")
    config = config or peft_config
    if config is None:
        return inner, dict(overrides)
    keys = keys_of(config)
    double = sorted(keys.keys() & {name.removeprefix("lora.") for name in overrides})
    if double:
        raise ConfigError(f"{', '.join(double)}: given by peft_config and as a key; give only one of them")
    return inner, {**overrides, **{f"lora.{name}": value for name, value in keys.items()}}


def checked_adapters(module: PreTrainedModel, config: TrainerConfig) -> AdapterSize | None:
    """Return the size of the adapters that a run trains, None if it trains all weights. Raises ConfigError if they
    cannot be had."""
    if config.lora.is_on:
        return adapter_size(module, peft_config_of(vars(config.lora)))
    if is_adapted(module):
        raise ConfigError(
            "the module has adapters, but lora.r is not set, so all weights would be trained: pass the PeftModel "
            "itself, or the module that merge_and_unload() returns"
        )
    return None


def _of_peft_model(model: Any) -> tuple[Any, Any]:
    """Return the module inside a PeftModel with the config of its adapter; anything else as it is, with None."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or not hasattr(model, "get_base_model"):
        return model, None
    if list(adapters) != [ADAPTER]:
        raise ConfigError(
            f"the PeftModel has the adapters {sorted(adapters)}; only one named {ADAPTER!r} can be trained"
        )
    return model.get_base_model(), adapters[ADAPTER]
