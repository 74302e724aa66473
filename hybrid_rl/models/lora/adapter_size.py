"""The size of adapters, counted on a copy of the module without weights."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.errors import ConfigError
from hybrid_rl.models.lora.inject import inject, is_adapter_name
from hybrid_rl.models.lora.target_layers import check_names, check_patterns
from hybrid_rl.weights.plain import is_adapted


@dataclass(frozen=True)
class AdapterSize:
    """How much of a model is trained. rank: lora.r; num_trained: parameters of the adapters, and of modules that are
    trained whole; num_base: those of the model without adapters."""

    rank: int
    num_trained: int
    num_base: int

    @property
    def share(self) -> float:
        """Trained parameters relative to those of the model."""
        return self.num_trained / self.num_base

    def __str__(self) -> str:
        return f"adapter r={self.rank}, {100 * self.share:.2g} % trained ({self.num_trained:,} parameters)"


def adapter_size(module: PreTrainedModel, settings: Any) -> AdapterSize:
    """Count the parameters that are trained if a module gets these adapters, or those that it has already.

    module: with weights or on meta; it does not change. settings: a peft LoraConfig. Raises ConfigError if it names
    something that the module does not have, or that cannot have an adapter, and for a rank above that of every weight.
    """
    adapted: nn.Module = module
    if not is_adapted(module):
        check_names(module, settings)
        _check_rank(module, settings)
        adapted = copy_on_meta(module)
        patterns = {key: list(getattr(settings, key)) for key in ("rank_pattern", "alpha_pattern")}  # peft adds its own
        with warnings.catch_warnings(action="ignore"):  # they come when the adapters are made
            inject(adapted, settings)
        check_patterns(adapted, patterns)
    sizes = {name: parameter.numel() for name, parameter in adapted.named_parameters()}
    trained = sum(size for name, size in sizes.items() if is_adapter_name(name))
    return AdapterSize(settings.r, trained, sum(sizes.values()) - trained)


def _check_rank(module: nn.Module, settings: Any) -> None:
    """Raise ConfigError for adapters that would be larger than any weight that they could change."""
    most = max((min(p.shape[-2:]) for p in module.parameters() if p.ndim > 1), default=0)
    rank = max(settings.r, *settings.rank_pattern.values(), 0)
    if most and rank > most:
        raise ConfigError(
            f"lora: adapters of rank {rank} are larger than the weights that they change, none of which has a rank "
            f"above {most}; set lora.r (and lora.peft.rank_pattern) to a fraction of that, or train all weights"
        )


def copy_on_meta(module: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a module whose parameters are on meta."""
    held: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, held)
