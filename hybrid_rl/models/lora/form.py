"""The form of the adapters of a module: which tensors they have, and by what their products are scaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.models.lora.inject import inject, is_adapter_name
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.weights.plain import ADAPTER
from hybrid_rl.weights.sources import StateSource


def form_of(module: nn.Module) -> dict[str, str]:
    """Return, by names, what two adapters must have in common to compute the same of the same numbers, as text."""
    form = {
        name: f"of shape {list(parameter.shape)}"
        for name, parameter in module.named_parameters()
        if is_adapter_name(name)
    }
    child: Any
    for name, child in module.named_modules():
        scaling = getattr(child, "scaling", None)
        if hasattr(child, "lora_A") and isinstance(scaling, dict):
            form[name] = f"of rank {child.r[ADAPTER]} and scaled by {float(scaling[ADAPTER]):g}"
    return form


def form_of_settings(model: PreTrainedModel | ModelRecipe, settings: Any) -> dict[str, str]:
    """Return the form of the adapters that a peft LoraConfig makes in a model, of which no weight is read; adapters
    that a module has already do not count."""
    if isinstance(model, PreTrainedModel):
        module = build_on_meta(ModelRecipe.of_module(model, StateSource({})), model.dtype)
    else:
        module = build_on_meta(model, torch.float32)
    inject(module, settings)
    return form_of(module)


def difference(given: dict[str, str], there: dict[str, str], place: str = "in the model") -> str | None:
    """Describe the first difference of two forms; None if there is none. place: where the second one is."""
    for name in sorted({*given, *there}):
        entry, other = given.get(name, "without an adapter"), there.get(name, "without an adapter")
        if entry != other:
            return f"by the keys, {name} is {entry}; {place} it is {other}"
    return None
