"""The model of a run, by name, as a module, or as an adapter with its base model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.checkpoint.manifest import check_model, check_model_texts
from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import ConfigError, ModelError
from hybrid_rl.models import check_tokenizer, load_model
from hybrid_rl.models.lora.folder import AdapterSource
from hybrid_rl.models.model_loading import DTYPES, model_folder
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.models.tokenizer import usable_tokenizer
from hybrid_rl.run.adapters import adapter_of, with_adapter
from hybrid_rl.run.checks import load_settings
from hybrid_rl.run.inputs import tokenizer_of, with_template


@dataclass(frozen=True)
class ModelChoice:
    """The model of a run, given by name or as a module; its weights are loaded last. adapter: the folder of the adapter
    to go on with, whose base model `path` is."""

    module: PreTrainedModel | None
    path: str | None
    tokenizer: PreTrainedTokenizerBase
    settings: PreTrainedConfig
    adapter: Path | None = None

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model's config allows; None if it does not say."""
        return getattr(self.settings.get_text_config(), "max_position_embeddings", None)

    def load(self, config: TrainerConfig, device: torch.device) -> PreTrainedModel:
        """Return the module that was passed, or load it from its path onto the device."""
        if self.module is not None:
            return self.module
        assert self.path is not None
        module = load_model(
            self.path, dtype=config.model.dtype, device=device, trust_remote_code=config.model.trust_remote_code
        )
        return module if self.adapter is None else with_adapter(module, self.adapter, config)

    def skeleton(self, config: TrainerConfig) -> PreTrainedModel:
        """Return the module; without weights if it was given by path."""
        return self.module or build_on_meta(self.recipe(config), DTYPES[config.model.dtype])

    def recipe(self, config: TrainerConfig) -> ModelRecipe:
        """Return the recipe with which other processes build a model that was given by path."""
        assert self.path is not None
        recipe = ModelRecipe.of_folder(self.path, trust_remote_code=config.model.trust_remote_code)
        return recipe if self.adapter is None else dataclasses.replace(recipe, adapter=AdapterSource(str(self.adapter)))


def choose_model(model: Any, tokenizer: Any, config: TrainerConfig) -> ModelChoice:
    """Return the model of a run: a module with its tokenizer, or a name or folder (argument or model.path). A tokenizer
    may also be a name or folder."""
    tokenizer = usable_tokenizer(tokenizer, "tokenizer", trust_remote_code=config.model.trust_remote_code)
    if model is not None and not isinstance(model, str) and not hasattr(model, "__fspath__"):
        if not isinstance(model, PreTrainedModel):
            raise ModelError(f"model is a {type(model).__name__}; pass a Hugging Face causal LM, or its name or folder")
        check_tokenizer(tokenizer, model)
        return ModelChoice(model, None, with_template(tokenizer, config), model.config)
    path = config.model.path if model is None else str(model)
    if path is None:
        raise ConfigError("there is no model: pass model= (a name, a folder or a module) or set model.path")
    path = model_folder(path)
    check_model_texts(Path(path))  # with a clearer error than that of a damaged tokenizer
    tokenizer = tokenizer_of(path, config) if tokenizer is None else with_template(tokenizer, config)
    path, adapter = adapter_of(path)
    if adapter is not None:
        check_model(adapter)  # the base is checked with its settings
    return ModelChoice(None, path, tokenizer, load_settings(path, config), adapter)
