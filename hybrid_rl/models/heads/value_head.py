"""A critic's module: the backbone of a causal language model with one number per token instead of its logits.

Its class is the one that transformers' AutoModelForTokenClassification takes for the family; a family without one gets
a class that is put together in the same way, so that its checkpoints have the same form.

A new head is zero. All values are 0 then, whatever the seed, the number of ranks or the backbone: the first advantages
are those of plain returns, without noise, and ranks need not agree on random numbers. The first update moves only the
head, since the gradient of what is below a head of zeros is zero; every later one moves everything.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_rl.compat.transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    GenericForTokenClassification,
)
from hybrid_rl.errors import ModelError
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta
from hybrid_rl.weights.boxes import Box
from hybrid_rl.weights.lazy import LazyTensor
from hybrid_rl.weights.loading import lazy_weights
from hybrid_rl.weights.names import match
from hybrid_rl.weights.plain import is_adapted, plain
from hybrid_rl.weights.sources import StateSource, WeightSource


def value_model_on_meta(recipe: ModelRecipe, dtype: torch.dtype) -> tuple[PreTrainedModel, WeightSource]:
    """Build the module on the meta device; return it with the source of its weights, for `load_weights`.

    If the recipe's weights have a head of one number, those of a critic or of a reward model, it is taken with the
    backbone; a bias that such a head lacks is zero. Otherwise they are those of the language model, and the head is
    zero. Raises ModelError if the architecture takes no value head, or the weights are not of this architecture.
    """
    language_model = build_on_meta(recipe, dtype)
    module = _headed(language_model, recipe, dtype)
    state = module.state_dict(keep_vars=True)
    below = f"{module.base_model_prefix}."
    head = {name: tuple(state[name].shape) for name in state if not name.startswith(below)}
    if head.keys() & match(module, recipe.source).tensors.keys():
        biases = frozenset(name for name in head if name.endswith("bias"))
        weights = lazy_weights(module, recipe.source, optional=biases)
    else:
        weights = _backbone_weights(language_model, recipe.source, below)
    zeros = {
        name: LazyTensor(head[name], dtype, functools.partial(_zeros, dtype)) for name in head if name not in weights
    }
    return module, _Filled(recipe.source, weights | zeros)


@torch.no_grad()
def value_model_of(module: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a live module's backbone, with all that was changed on it but adapters, and a head of zeros; of
    a critic or a reward model with its head. What is frozen stays so, but for what is only to train adapters."""
    recipe = ModelRecipe.of_module(module, StateSource({}))
    with plain(module, trained=False):
        value_model = _headed(module, recipe, module.dtype)
        setattr(value_model, value_model.base_model_prefix, copy.deepcopy(module.base_model))
        own = dict(module.named_parameters())
    if is_adapted(module):
        value_model.requires_grad_(True)
    for name, parameter in list(value_model.named_parameters()):
        if not parameter.is_meta:
            continue
        values = own[name] if name in own else torch.zeros(parameter.shape, dtype=module.dtype, device=module.device)
        if values.shape != parameter.shape:
            raise _no_value_head(module, f"its {name} is {list(values.shape)}, not {list(parameter.shape)}")
        parent, _, leaf = name.rpartition(".")
        setattr(value_model.get_submodule(parent), leaf, torch.nn.Parameter(values.detach().clone()))
    return value_model.eval()


def value_model_class(language_model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of a model of this family with one number per token.

    Raises ModelError if there is none and none can be put together.
    """
    kind, config = type(language_model), language_model.config
    if type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return cast(type[PreTrainedModel], MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)])
    families = [base for base in kind.__mro__[1:] if PreTrainedModel in base.__bases__]
    if not families or type(config) not in MODEL_MAPPING:
        raise _no_value_head(language_model, "transformers has no backbone for its config")
    return _composed(families[0])


@functools.cache
def _composed(family: type[PreTrainedModel]) -> type[PreTrainedModel]:
    name = family.__name__.removesuffix("PreTrainedModel") + "ForTokenClassification"
    members = {"base_model_prefix": family.base_model_prefix, "__module__": __name__}
    return type(name, (GenericForTokenClassification, family), members)


def _no_value_head(language_model: PreTrainedModel, why: str) -> ModelError:
    return ModelError(
        f"{type(language_model).__name__} cannot be given a value head: {why}; set critic_path to a model of a family "
        f"such as Llama, Qwen2, Qwen3, Mistral, Gemma or GPT-2 that has the same tokenizer"
    )


def _headed(language_model: PreTrainedModel, recipe: ModelRecipe, dtype: torch.dtype) -> PreTrainedModel:
    """Build the module on the meta device, with the language model's frozen parameters frozen."""
    config: PreTrainedConfig = copy.deepcopy(language_model.config)
    config.num_labels = 1
    kind = value_model_class(language_model)
    value_model = build_on_meta(
        dataclasses.replace(recipe, model_class=kind, config=config, generation_config=None, conversions=None), dtype
    )
    mine, own = type(value_model.base_model), type(language_model.base_model)
    if mine is not own:
        raise _no_value_head(
            language_model, f"its backbone is a {own.__name__}, that of {kind.__name__} a {mine.__name__}"
        )
    if language_model.get_output_embeddings() is None:  # a critic or a reward model: its head must have a place
        left = dict(language_model.named_parameters()).keys() - dict(value_model.named_parameters()).keys()
        if left:
            raise _no_value_head(language_model, f"{kind.__name__} has no place for its {min(left)}")
    return value_model


def _backbone_weights(language_model: PreTrainedModel, source: WeightSource, prefix: str) -> dict[str, LazyTensor]:
    """Return what a language model's source has for its backbone, by the names of the module with the value head."""
    state = language_model.state_dict(keep_vars=True)
    below = f"{language_model.base_model_prefix}."
    beside = frozenset(name for name in state if not name.startswith(below))
    weights = {id(state[name]): lazy for name, lazy in lazy_weights(language_model, source, optional=beside).items()}
    # By identity: of an embedding that is tied to the language head the source may hold only the head's name.
    backbone = {name.removeprefix(below): id(tensor) for name, tensor in state.items() if name.startswith(below)}
    return {prefix + name: weights[tensor] for name, tensor in backbone.items() if tensor in weights}


def _zeros(dtype: torch.dtype, box: Box) -> Tensor:
    return torch.zeros([part.stop - part.start for part in box], dtype=dtype)


class _Filled(WeightSource):
    """Tensors by the module's own names, most of them read from another source."""

    def __init__(self, source: WeightSource, found: Mapping[str, LazyTensor]) -> None:
        self.label = source.label
        self._source = source
        self._found = found

    def names(self) -> Sequence[str]:
        return list(self._found)

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self._found[name].shape), self._found[name].dtype

    def _read(self, name: str, box: Box) -> Tensor:
        return self._found[name].read(box)

    def close(self) -> None:
        self._source.close()
