"""The models of a run, without their weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.config import TrainerConfig, ValueHeadConfig
from hybrid_rl.models.heads.value_head import value_model_of
from hybrid_rl.models.lora.adapter_size import adapter_size, copy_on_meta
from hybrid_rl.models.lora.inject import inject
from hybrid_rl.models.lora.peft_config import critic_peft_config, peft_config_of
from hybrid_rl.models.model_loading import DTYPES
from hybrid_rl.models.packed.classifier import classifier_recipe
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.weights.sources import StateSource

Given = PreTrainedModel | ModelRecipe | str


@dataclass(frozen=True)
class RunModels:
    """Modules on the meta device, without adapters: these are the business of a configuration (`adapted`). critic,
    teacher: None if the run has none."""

    policy: PreTrainedModel
    teacher: PreTrainedModel | None = None
    critic: PreTrainedModel | None = None
    rewards: tuple[PreTrainedModel, ...] = ()

    @classmethod
    def of(
        cls,
        policy: Given,
        config: TrainerConfig,
        *,
        teacher: Given | None = None,
        critic: Given | None = None,
        rewards: Sequence[Given] = (),
    ) -> RunModels:
        """Build them from modules, recipes, or names and folders, of which only the config is read. critic: the model
        that it starts from, None for the policy; there is one if the configuration has one.

        Raises ModelError if one cannot be built.
        """
        has_critic = isinstance(config.critic, ValueHeadConfig)
        value_model = value_model_of(_on_meta(critic or policy, config)) if has_critic else None
        return cls(
            _on_meta(policy, config),
            None if teacher is None else _on_meta(teacher, config).requires_grad_(False),
            None if value_model is None else value_model.requires_grad_(True),
            tuple(_on_meta(model, config, scores=True).requires_grad_(False) for model in rewards),
        )


def _on_meta(model: Given, config: TrainerConfig, *, scores: bool = False) -> PreTrainedModel:
    if isinstance(model, PreTrainedModel):
        return built(ModelRecipe.of_module(model, StateSource({})), model.dtype)
    if isinstance(model, str):
        trusts = config.model.trust_remote_code
        make = classifier_recipe if scores else ModelRecipe.of_folder
        model = make(model, trust_remote_code=trusts)
    return built(model, DTYPES[config.model.dtype])


def adapted(module: PreTrainedModel, config: TrainerConfig, *, is_critic: bool = False) -> PreTrainedModel:
    """Return a copy of a model on meta that is frozen and has the adapters of `lora`; a critic's head is trained whole.

    Raises ConfigError if it cannot have them, or without peft.
    """
    meta_copy, keys = copy_on_meta(module), vars(config.lora)
    if not is_critic:
        adapter_size(module, peft_config_of(keys))  # refuses names that peft ignores
    with warnings.catch_warnings(action="ignore"):  # they come when the adapters are made
        inject(meta_copy, critic_peft_config(meta_copy, keys) if is_critic else peft_config_of(keys))
    nn.Module.to(meta_copy, "meta")
    return meta_copy


def built(recipe: ModelRecipe, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model without any numbers: also its buffers are on the meta device, as on a GPU all are on the GPU."""
    module = build_on_meta(recipe, dtype)
    nn.Module.to(module, "meta")
    return module
