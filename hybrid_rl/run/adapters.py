"""Adapters that a user passes: a LoraConfig, a PeftModel, a module that has adapters already, or a folder of them."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hybrid_rl.checkpoint.base_model import base_of
from hybrid_rl.config import TrainerConfig, load_config
from hybrid_rl.config.algorithm import reference_is_policy
from hybrid_rl.errors import CheckpointError, ConfigError
from hybrid_rl.models.lora.adapter_size import AdapterSize, adapter_size
from hybrid_rl.models.lora.folder import (
    CONFIG_FILE,
    AdapterSource,
    is_adapter_folder,
    load_adapter,
    read_settings,
    settings_of,
)
from hybrid_rl.models.lora.form import difference, form_of, form_of_settings
from hybrid_rl.models.lora.inject import check_in_use, inject, is_untouched
from hybrid_rl.models.lora.peft_config import keys_of, peft_config_of
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.models.tokenizer import has_tokenizer
from hybrid_rl.weights.plain import ADAPTER, take_out_empty

logger = logging.getLogger("hybrid_rl")

BROUGHT = "the adapter of the model that you pass"


def with_adapters(model: Any, peft_config: Any, overrides: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model without peft's outer class, and the overrides with the keys of the adapters, which the run
    folder records. What adapters that were deleted have left in the model is taken out of it. Raises ConfigError if
    they are given twice, or cannot be trained."""
    inner, brings = _of_peft_model(model)
    if isinstance(inner, PreTrainedModel):
        take_out_empty(inner)
    if brings and peft_config is not None:
        raise ConfigError("the model is a PeftModel with adapters of its own; leave peft_config out")
    if peft_config is None:
        return inner, dict(overrides)
    keys = keys_of(peft_config)
    section = overrides.get("lora")
    others = {*overrides, *(section if isinstance(section, Mapping) else ())}
    double = sorted(keys.keys() & {name.removeprefix("lora.") for name in others})
    if double:
        raise ConfigError(f"{', '.join(double)}: given by peft_config and as a key; give only one of them")
    return inner, {**overrides, **{f"lora.{name}": value for name, value in keys.items()}}


def checked_adapters(module: PreTrainedModel, config: TrainerConfig) -> AdapterSize | None:
    """Return the size of the adapters that a run trains, None if it trains all weights. Raises ConfigError if they
    cannot be had."""
    return adapter_size(module, peft_config_of(vars(config.lora))) if config.lora.is_on else None


def _of_peft_model(model: Any) -> tuple[Any, bool]:
    """Return the module inside a PeftModel, anything else as it is; and whether it was one."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping):
        return model, False
    if list(adapters) != [ADAPTER]:
        raise ConfigError(
            f"the PeftModel has the adapters {sorted(adapters)}; only one named {ADAPTER!r} can be trained"
        )
    if not hasattr(model, "get_base_model"):
        return model, False
    keys_of(adapters[ADAPTER], BROUGHT)  # or a method that is not supported would be left out with peft's outer class
    return model.get_base_model(), True


def own_settings(model: Any) -> Any:
    """Return the peft config of the adapters that a model brings, a module or a folder; None if it brings none."""
    if isinstance(model, PreTrainedModel):
        return settings_of(model)
    is_path = isinstance(model, str | os.PathLike)
    return read_settings(model) if is_path and is_adapter_folder(model) else None


def record_adapters(
    config: TrainerConfig, given: frozenset[str], model: Any
) -> tuple[TrainerConfig, frozenset[str], Any]:
    """Return the config and the given keys with those of the adapters that the model brings, and their peft config,
    None if it brings none. Keys of adapters that are given stay: they must describe the same (`check_adapters`). Raises
    ConfigError if they cannot be trained."""
    source = config.model.path if model is None else model
    peft_config = own_settings(source)
    if peft_config is None:
        return config, given, None
    name = BROUGHT
    if isinstance(source, PreTrainedModel):
        if not config.lora.is_on:
            _check_user_put_in(source)
    else:
        name = str(Path(str(source)) / CONFIG_FILE)
        if getattr(peft_config, "lora_dropout", 0):
            logger.warning(
                f"{name}: lora_dropout={peft_config.lora_dropout} is left out: ratios need the same network twice, and "
                "there is no dropout here"
            )
            peft_config.lora_dropout = 0.0
    keys = {f"lora.{key}": value for key, value in keys_of(peft_config, name).items()}
    missing = {path: value for path, value in keys.items() if path not in given}
    return load_config(config, missing)[0], given | keys.keys(), peft_config


def check_adapters(model: PreTrainedModel | ModelRecipe, brings: Any, config: TrainerConfig) -> None:
    """Raise ConfigError if keys describe other adapters than those that a model brings, or if those are merged into its
    weights or switched off. brings: their peft config."""
    if isinstance(model, PreTrainedModel):
        check_in_use(model)
    asked = form_of_settings(model, peft_config_of(vars(config.lora)))
    there = form_of(model) if isinstance(model, PreTrainedModel) else form_of_settings(model, brings)
    if isinstance(model, PreTrainedModel):
        own = copy.deepcopy(brings)
        own.inference_mode = False  # or its adapters would be frozen
        first_difference = difference(form_of_settings(model, own), there)
        if first_difference is not None:
            raise ConfigError(
                f"{BROUGHT} is not what its peft config says: {first_difference.replace('by the keys', 'by that')}. "
                "Saved and loaded again it would be another; undo set_scale or scale_layer, or change lora_alpha "
                "of the config"
            )
    if first_difference := difference(asked, there):
        if isinstance(model, PreTrainedModel):
            _check_user_put_in(model)
        raise ConfigError(
            f"the model has adapters already, and the keys of lora describe others: {first_difference}. Leave the "
            "keys out to go on training those that it has; to begin with new ones, load the model without them"
        )


def _check_user_put_in(module: PreTrainedModel) -> None:
    if is_untouched(module):
        raise ConfigError(
            "the module has adapters of a Trainer that is still open, which have learned nothing. close() that "
            "Trainer, which takes them out, or give the same keys of lora to train them on"
        )


def check_resumed_adapters(model: PreTrainedModel | ModelRecipe, folder: Path, config: TrainerConfig) -> None:
    """Raise CheckpointError if the adapters of a checkpoint are others than those of the keys: its numbers, scaled by
    another factor, are another policy. Whether both are adapters at all is checked when it is loaded."""
    if not config.lora.is_on or not is_adapter_folder(folder):
        return
    try:
        there = form_of_settings(model, read_settings(folder))
    except ConfigError as error:
        raise CheckpointError(f"cannot resume from {folder}: its adapters do not fit this model: {error}") from error
    asked = form_of_settings(model, peft_config_of(vars(config.lora)))
    if first_difference := difference(asked, there, "in the checkpoint"):
        raise CheckpointError(
            f"cannot resume from {folder}: its adapters are others than those of this run: {first_difference}. Give "
            "the keys of lora with which it was written"
        )


def with_adapter(module: PreTrainedModel, folder: Path, config: TrainerConfig) -> PreTrainedModel:
    """Put the adapter of a folder into its base model, and return that. Raises ModelError if it does not fit."""
    inject(module, peft_config_of(vars(config.lora)))
    load_adapter(module, AdapterSource(str(folder)))
    return module


def adapter_of(path: str) -> tuple[str, Path | None]:
    """Return the model that a path means, and the adapter that goes into it: of an adapter folder its base model, of
    anything else itself, without one. Raises ModelError if there is no such base."""
    if not is_adapter_folder(path):
        return path, None
    return base_of(Path(path)), Path(path)


def tokenizer_place(path: str) -> str:
    """Return where the tokenizer of a model is: of an adapter folder without one, its base model. Raises ModelError if
    there is no such base."""
    return path if not is_adapter_folder(path) or has_tokenizer(Path(path)) else adapter_of(path)[0]


def tell_of_reference(config: TrainerConfig) -> None:
    """Say that a run which begins with an adapter is compared with the model below it, if it is compared at all."""
    if reference_is_policy(config):
        logger.warning(
            "the reference of this run is the base model, without the adapter that it begins with; to stay close to "
            "the model with that adapter, merge the adapter first (trainer.save(merged=True)) and train a new one"
        )
