"""Recipes to build a model's module in any process, without its weights."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hybrid_rl.compat.transformers import (
    fp32_pattern,
    loaded_conversions,
    model_from_config,
    no_init_weights,
    remember_conversions,
)
from hybrid_rl.errors import ModelError
from hybrid_rl.models.model_loading import auto_class, model_folder
from hybrid_rl.weights.plain import plain
from hybrid_rl.weights.sources import FolderSource, WeightSource, names_of_each


@dataclass(frozen=True)
class ModelRecipe:
    """A model by folder (or hub name), or a live module by class and config; and the source of its weights.

    frozen: names of parameters that require no gradient. conversions: those that the live module was loaded with.
    adapter: source of the adapter to begin with, by peft's names; None = a new one, if the run trains one.
    """

    source: WeightSource
    path: str | None = None
    trust_remote_code: bool = False
    model_class: type[PreTrainedModel] | None = None
    config: PreTrainedConfig | None = None
    generation_config: GenerationConfig | None = None
    frozen: frozenset[str] = frozenset()
    conversions: tuple[Any, ...] | None = None
    adapter: WeightSource | None = None

    @classmethod
    def of_folder(cls, path: str, *, trust_remote_code: bool = False) -> ModelRecipe:
        """Describe the model of a folder, hub name or GGUF file; each process reads the files itself."""
        path = model_folder(path)
        return cls(FolderSource(path), path, trust_remote_code)

    @classmethod
    def of_module(cls, module: PreTrainedModel, source: WeightSource) -> ModelRecipe:
        """Describe a live module, without its adapters, whose weights are in `source` (StateSource, ObjectSource)."""
        conversions = loaded_conversions(module)
        with plain(module, trained=False):
            frozen = frozenset(name for name, p in module.named_parameters() if not p.requires_grad)
        return cls(
            source,
            model_class=type(module),
            config=copy.deepcopy(module.config),
            generation_config=copy.deepcopy(getattr(module, "generation_config", None)),
            frozen=frozen,
            conversions=None if conversions is None else tuple(conversions),
        )


def build_on_meta(recipe: ModelRecipe, dtype: torch.dtype) -> PreTrainedModel:
    """Build the module in evaluation mode: parameters of `dtype` on the meta device, tied if the config ties them;
    buffers real, since code computes them.

    What the model class keeps in fp32 is fp32. The global random state stays as it was. Raises ModelError if the
    model cannot be built, or holds quantised weights.
    """
    try:
        module = _build(recipe, dtype)
    except ModelError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError and others here
        label = f"model {recipe.path!r}" if recipe.path else f"a {recipe.model_class.__name__}"  # type: ignore[union-attr]
        raise ModelError(f"cannot load {label}: {type(error).__name__}: {error}") from error
    _check_sizes(module)
    # Patched registration makes a new parameter of every tied one.
    module.tie_weights()
    for name in fp32_tensors(module, dtype):
        tensor = module.get_parameter_or_buffer(name)
        tensor.data = tensor.data.float()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in recipe.frozen)
    if recipe.conversions is not None:
        remember_conversions(module, recipe.conversions)
    return module.eval()


def check_parameters(module: PreTrainedModel, built: nn.Module) -> None:
    """Raise ModelError if the copy has other parameters than the live module, or ties others."""
    mine, theirs = _ties(module), _ties(built)
    names = {name for tied in mine for name in tied} ^ {name for tied in theirs for name in tied}
    class_name = type(module).__name__
    if names:
        raise ModelError(
            f"{class_name}: parameters such as {min(names)!r} are not those that its class and config make; a module "
            f"that was changed after it was built cannot be copied to other processes: use num_ranks=1, or give it a "
            f"class of its own"
        )
    if mine != theirs:
        shown = sorted(max(mine ^ theirs, key=lambda tied: len(list(tied))))
        raise ModelError(
            f"{class_name}: {' and '.join(shown)} are tied in the module or by its config, but not in both; set "
            f"config.tie_word_embeddings to what the module does"
        )


def _ties(module: nn.Module) -> set[frozenset[str]]:
    return set(map(frozenset, names_of_each(dict(module.named_parameters(remove_duplicate=False)))))


def _check_sizes(module: PreTrainedModel) -> None:
    """Raise ModelError for sizes with which the module can be built, but computes nothing."""
    config: Any = module.config.get_text_config()
    for name, parameter in module.named_parameters():
        if 0 in parameter.shape:
            raise ModelError(
                f"config.json makes {name} an empty tensor, {tuple(parameter.shape)}; correct its sizes (vocab_size="
                f"{config.vocab_size})"
            )
    heads, key_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(key_heads, int) and key_heads and heads % key_heads:
        raise ModelError(
            f"config.json has num_attention_heads={heads}, which num_key_value_heads={key_heads} does not divide; "
            f"correct one of them"
        )


def fp32_tensors(module: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return the names of parameters and buffers that stay fp32 in a model of this dtype, by the rule of its class."""
    pattern = fp32_pattern(module, dtype)
    return set() if pattern is None else {name for name in module.state_dict() if pattern.search(name)}


def _build(recipe: ModelRecipe, dtype: torch.dtype) -> PreTrainedModel:
    config: Any = recipe.config
    if config is None:
        assert recipe.path is not None
        config = AutoConfig.from_pretrained(recipe.path, trust_remote_code=recipe.trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"cannot load {recipe.source.label}: its weights are quantised, which cannot be trained, nor can "
            "adapters on them (QLoRA); convert it to bfloat16 first"
        )
    config = copy.deepcopy(config)
    # Some classes draw random numbers while they are built, although no weight is kept.
    with init_empty_weights(include_buffers=False), no_init_weights(), torch.random.fork_rng(devices=[]):
        if recipe.model_class is None:
            loader = auto_class(config)
            module = loader.from_config(config, dtype=dtype, trust_remote_code=recipe.trust_remote_code)
        else:
            module = model_from_config(recipe.model_class, config, dtype)
    if recipe.path is not None and module.can_generate():
        with suppress(OSError):  # a folder without one: what the model's config says stays
            module.generation_config = GenerationConfig.from_pretrained(recipe.path)
    elif recipe.generation_config is not None:
        module.generation_config = copy.deepcopy(recipe.generation_config)
    return cast(PreTrainedModel, module)
