"""transformers' names outside its public interface. Tried with transformers 5.19.0."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.initialization import no_init_weights
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_utils import str_to_torch_dtype
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils import cached_file
from transformers.utils.output_capturing import OutputRecorder

__all__ = [
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
    "GenericForTokenClassification",
    "OutputRecorder",
    "PrefixChange",
    "WeightConverter",
    "WeightRenaming",
    "WeightTransform",
    "batched_mm_experts_forward",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "no_init_weights",
    "rename_source_key",
    "str_to_torch_dtype",
]

# Each name that is private, or in a module that transformers does not document, and why there is no public way.
NAMES = {
    "transformers.PreTrainedConfig._attn_implementation": "what layers look up their attention function by",
    "transformers.PreTrainedConfig._auto_class": "whether a config brings its own code",
    "transformers.PreTrainedModel._auto_class": "the same of a model",
    "transformers.PreTrainedModel._no_split_modules": "the only list of a family's transformer blocks",
    "transformers.PreTrainedModel._can_record_outputs": "where the routers of a family are",
    "transformers.PreTrainedModel._from_config": "builds a given class; the public from_config chooses the class",
    "transformers.PreTrainedModel._get_dtype_plan": "which parameters a class keeps in float32",
    "transformers.PreTrainedModel._keep_in_fp32_modules": "the same, in parts of names",
    "transformers.PreTrainedModel._keep_in_fp32_modules_strict": "the same, for bfloat16 too",
    "transformers.PreTrainedModel._hf_peft_config_loaded": "whether a module has adapters of peft, which it then saves",
    "transformers.PreTrainedModel._keys_to_ignore_on_save": "which tensors a checkpoint does not hold",
    "transformers.PreTrainedModel._adjust_missing_and_unexpected_keys": "which tensors a checkpoint may lack",
    "transformers.conversion_mapping.get_model_conversion_mapping": "how a checkpoint's names become a module's",
    "transformers.core_model_loading.PrefixChange": "a kind of conversion of names",
    "transformers.core_model_loading.WeightConverter": "a conversion of tensors",
    "transformers.core_model_loading.WeightRenaming": "a conversion of names",
    "transformers.core_model_loading.WeightTransform": "what conversions have in common",
    "transformers.core_model_loading.build_glob_alternation": "reads the plan of dtypes",
    "transformers.core_model_loading.dot_natural_key": "the order in which tensors are converted",
    "transformers.core_model_loading.rename_source_key": "applies conversions to one name",
    "transformers.dynamic_module_utils.custom_object_save": "writes the code of a model that brings its own",
    "transformers.initialization.no_init_weights": "builds a model without drawing random weights",
    "transformers.modeling_layers.GenericForTokenClassification": "a head of one number per token for any family",
    "transformers.modeling_utils.str_to_torch_dtype": "the dtypes of safetensors by name",
    "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING": "which class a config belongs to",
    "transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING": "the same, with images",
    "transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": "the same, of reward models",
    "transformers.models.auto.modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING": "the same, of critics",
    "transformers.models.auto.modeling_auto.MODEL_MAPPING": "the same, of backbones",
    "transformers.masking_utils.find_packed_sequence_indices": "finds samples packed into a row, by their numbers",
    "transformers.PreTrainedConfig._experts_implementation": "how the experts of a mixture are computed",
    "transformers.integrations.moe.batched_mm_experts_forward": "experts of few tokens that no host reads anything of",
    "transformers.utils.output_capturing.OutputRecorder": "tells a router's logits from its other outputs",
}
# Attributes that transformers gives to instances, so that no class shows them, and a keyword that is handed on.
UNDECLARED_NAMES = {
    "_raise_exceptions_for_missing_entries": "whether the hub lacks a file, or cannot be reached",
    "_weight_conversions": "the conversions that a model was loaded with, which saving reverts",
    "_apply_gate": "what experts do between their two products",
    "_is_expert_parallel": "whether experts are spread over ranks; with `_apply_gate`, what marks experts",
}

_Config = TypeVar("_Config", bound=PreTrainedConfig)


def config_view(config: _Config, chosen: Callable[[PreTrainedConfig], str | None]) -> _Config:
    """Another object with the attributes of a config, shared and not copied, that answers differently when asked for
    the name of its attention function: with what `chosen` gives for the view; if that is None, with the config's own.

    transformers reads that name from a config wherever it is needed. A name that holds in one thread only can neither
    be written into the config, which other threads read, nor be given to a call. The view is of a subclass with the
    name of the config's class, equals the config, and is copied and pickled as the config itself.
    """
    kind: Any = type(config)
    view: Any = object.__new__(_view_class(kind, chosen))
    object.__setattr__(view, "_viewed", config)
    object.__setattr__(view, "__dict__", vars(config))
    seen: _Config = view
    return seen


def viewed_config(config: _Config) -> _Config:
    """Return the config that a view shows; a config that is not a view, as it is."""
    own: _Config = config._viewed if isinstance(config, _View) else config
    return own


class _View:
    """What the views of all classes of configs have in common."""

    __slots__ = ()
    _viewed: Any

    def __copy__(self) -> PreTrainedConfig:
        return copy.copy(self._viewed)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any]]:
        return _itself, (self._viewed,)


def _itself(config: PreTrainedConfig) -> PreTrainedConfig:
    return config


@functools.cache
def _view_class(cls: Any, chosen: Callable[[PreTrainedConfig], str | None]) -> type[Any]:
    named: Any = PreTrainedConfig._attn_implementation
    members = {
        "__slots__": ("_viewed",),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__init__": cls.__init__,  # what is not here transformers makes of the fields of the class
        "__eq__": lambda view, other: view._viewed == viewed_config(other),
        "_attn_implementation": property(lambda view: chosen(view) or named.fget(view), named.fset),
    }
    return type(cls.__name__, (_View, cls), members)


def save_own_code(owners: Sequence[PreTrainedModel | PreTrainedConfig], config: PreTrainedConfig, folder: Path) -> None:
    """Write the code of a model or config that brings its own into a folder, and name it in this config."""
    for owner in owners:
        if owner._auto_class is not None:
            custom_object_save(owner, folder, config=config)  # type: ignore[arg-type]


def attention_name(config: PreTrainedConfig) -> str | None:
    """Return the attention function that a config names."""
    name: str | None = config._attn_implementation
    return name


def cached_file_or_none(path: str, name: str) -> str | None:
    """Return the path here of a file of a model on the hub, None if the model has no such file. Public arguments make
    no difference between that and a hub that cannot be reached."""
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False)


def block_class_names(model: PreTrainedModel) -> set[str]:
    """Names of the classes whose modules transformers will not split over devices: a family's transformer blocks."""
    return set(getattr(model, "_no_split_modules", None) or ())


def router_recorders(model: PreTrainedModel) -> list[OutputRecorder]:
    """Return what transformers says about where the router logits of this model, submodels apart, come from."""
    recorders = (model._can_record_outputs or {}).get("router_logits")
    listed = recorders if isinstance(recorders, list) else [recorders]
    return [recorder for recorder in listed if isinstance(recorder, OutputRecorder)]


def experts_of(module: nn.Module) -> list[tuple[Any, str | None]]:
    """Return the modules inside that hold all experts of a layer and can compute them in several ways, each with the
    name of its way."""
    experts: list[Any] = [child for child in module.modules() if getattr(child, "_is_expert_parallel", None) is False]
    return [(child, child.config._experts_implementation) for child in experts if hasattr(child, "_apply_gate")]


def gated(experts: Any, hidden: Tensor) -> Tensor:
    """Return what experts make of the results of their first product."""
    between: Tensor = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    return between


def rereading_rotaries(module: nn.Module) -> list[nn.Module]:
    """Return the rotary embeddings inside that choose their frequencies in every pass, by its longest sequence, which
    the host reads."""
    rotaries = [child for child in module.modules() if hasattr(type(child).forward, "__wrapped__")]
    kinds = [(child, getattr(child, "rope_type", None)) for child in rotaries]
    return [
        child
        for child, kind in kinds
        if any(k == "longrope" or "dynamic" in k for k in (kind.values() if isinstance(kind, dict) else [kind or ""]))
    ]


def model_from_config(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Build a model of this very class, with the weights that its code gives it."""
    model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
    return model


def fp32_pattern(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return what is found in the names of the tensors that stay float32 in a model of this dtype; None if none do."""
    plan = model._get_dtype_plan(dtype)
    return build_glob_alternation([*plan])[0] if plan else None


def fp32_name_parts(model: PreTrainedModel) -> list[str]:
    """Parts of the names of parameters that transformers keeps in float32, in any dtype that asks for it."""
    return [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]


def keys_not_saved(model: PreTrainedModel) -> set[str]:
    """Names of tensors that a checkpoint of this class does not hold."""
    return set(model._keys_to_ignore_on_save or ())


def mark_adapted(model: PreTrainedModel, is_adapted: bool = True) -> None:
    """Tell a module whether it has adapters of peft: it then saves them, and can switch them off."""
    model._hf_peft_config_loaded = is_adapted


def relevant_keys(model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Return which of the names that a checkpoint lacks, and of those that it has too many, matter to this class."""
    report = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(report)  # type: ignore[arg-type]
    return report.missing_keys, report.unexpected_keys


def loaded_conversions(model: PreTrainedModel) -> list[Any] | None:
    """Return the conversions that a model was loaded with; None if it was not loaded from a checkpoint, or if those of
    an adapter, which load_adapter() puts in their place, are all that is left."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None or any(
        "lora_" in pattern for conversion in conversions for pattern in conversion.source_patterns
    ):
        return None
    return list(conversions)


def remember_conversions(model: PreTrainedModel, conversions: Sequence[Any]) -> None:
    """Note the conversions that a model was loaded with, for transformers' saving and for ours."""
    model._weight_conversions = list(conversions)  # type: ignore[assignment]


@contextlib.contextmanager
def unpacked_masks() -> Iterator[None]:
    """Let models make masks without looking for packed samples: they read numbers for that, which a model on the meta
    device does not have. Not for two threads at a time."""
    own = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = own
