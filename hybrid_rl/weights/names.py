"""Translation between checkpoint names and module names, by transformers' own conversion mappings.

A checkpoint may name a tensor differently from the module, or hold in parts what the module has fused (experts).
transformers says how, as renamings and converters; here they are applied to names and lazy tensors instead of to a
whole state dict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hybrid_rl.compat.transformers import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    get_model_conversion_mapping,
    keys_not_saved,
    loaded_conversions,
    rename_source_key,
)
from hybrid_rl.weights.boxes import Box
from hybrid_rl.weights.lazy import LazyTensor, NotLazyError
from hybrid_rl.weights.sources import WeightSource, names_of_each

Transform = WeightRenaming | WeightConverter


@dataclass
class Conversion:
    """Tensors that transformers converts together. name: the first of the results; parts: (pattern, name) of the
    inputs; transform: unused, each conversion works on a copy."""

    name: str
    transform: Transform
    parts: list[tuple[str, str]] = field(default_factory=list)

    def run(self, module: PreTrainedModel, tensor_of: Callable[[str], Any]) -> dict[str, Any]:
        """Return the results by name. tensor_of: returns the tensor of an input name."""
        transform = deepcopy(self.transform)
        for pattern, name in self.parts:
            transform.add_tensor(self.name, name, pattern, tensor_of(name))
        results = transform.convert(self.name, model=module, config=module.config)
        return {name: result[0] if isinstance(result, list) else result for name, result in results.items()}


@dataclass
class Match:
    """The tensors of a source for a module: a lazy tensor per name of the state dict, and source names that fit no
    tensor of the module. conversions: those of transformers that were used, which saving reverts."""

    tensors: dict[str, LazyTensor]
    unexpected: set[str]
    conversions: list[WeightTransform]


@contextlib.contextmanager
def own_classes(module: PreTrainedModel) -> Iterator[None]:
    """Give modules their own classes inside the block: fully_shard puts a class FSDP<name> over each, and transformers
    finds mappings, tied weights and code by class."""
    covered = [(m, type(m)) for m in module.modules() if isinstance(m, FSDPModule)]
    for child, cls in covered:
        child.__class__ = next(  # type: ignore[assignment]
            base for base in cls.__mro__ if not issubclass(base, FSDPModule)
        )
    try:
        yield
    finally:
        for child, cls in covered:
            child.__class__ = cls


def match(module: PreTrainedModel, source: WeightSource) -> Match:
    """Find the module's tensors in a source. Reads names, shapes and dtypes only."""
    if not source.uses_checkpoint_names:
        wanted = set(module.state_dict())
        own = {name: LazyTensor.of(source, name) for name in source.names() if name in wanted}
        return Match(own, set(source.names()) - wanted, [])
    transforms = get_model_conversion_mapping(module)
    conversions, unexpected = _conversions_to_module(module, transforms, source.names())
    tensors: dict[str, LazyTensor] = {}
    for conversion in conversions:
        tensors.update(_lazy_results(module, conversion, source))
    return Match(tensors, unexpected, [transform for transform in transforms if transform.was_used()])


def saved_names(module: PreTrainedModel) -> list[list[str]]:
    """Return the names in a module of each tensor that a checkpoint holds, that which loading expects first."""
    tied = set(module.get_expanded_tied_weights_keys(all_submodels=True))
    state, ignored = module.state_dict(keep_vars=True), keys_not_saved(module)
    wanted = sorted((name for name in state if name not in ignored), key=lambda name: name in tied)
    return names_of_each({name: state[name] for name in wanted})


def checkpoint_conversions(module: PreTrainedModel, names: Sequence[str]) -> list[Conversion]:
    """Return the conversions from these module names to a checkpoint: as the model was loaded, else as its family is
    saved."""
    transforms = loaded_conversions(module)
    if transforms is None:
        # transformers does not guess prefixes that no loaded checkpoint showed.
        transforms = [
            transform
            for transform in get_model_conversion_mapping(module, add_legacy=False)
            if not isinstance(transform, PrefixChange)
        ]
    reverse = [transform.reverse_transform() for transform in transforms[::-1]]
    renamings, converters, by_pattern = _split(reverse)
    conversions: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
        _collect(conversions, by_pattern, name, renamed, pattern)
    return list(conversions.values())


def _conversions_to_module(
    module: PreTrainedModel, transforms: list[Any], names: Sequence[str]
) -> tuple[list[Conversion], set[str]]:
    """Return the conversions to the module's tensors, and names that fit none; in the order and by the rules of
    transformers' own loading."""
    state = module.state_dict()
    renamings, converters, by_pattern = _split(transforms)
    prefix = module.base_model_prefix
    conversions: dict[str, Conversion] = {}
    unexpected: set[str] = set()
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed in state:
            _collect(conversions, by_pattern, name, renamed, pattern)
        elif pattern is not None:
            targets = by_pattern[pattern].target_patterns
            unexpected.update(renamed.replace(targets[0], target) for target in targets)
        else:
            unexpected.add(renamed)
    return list(conversions.values()), unexpected


def _split(
    transforms: Sequence[Any],
) -> tuple[list[WeightRenaming], list[WeightConverter], dict[str, WeightConverter]]:
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    return renamings, converters, {pattern: c for c in converters for pattern in c.source_patterns}


def _collect(
    found: dict[str, Conversion],
    by_pattern: Mapping[str, WeightConverter],
    name: str,
    renamed: str,
    pattern: str | None,
) -> None:
    if pattern is None:
        # A renaming of one full name; a second one to the same name is left out, as transformers does.
        found.setdefault(renamed, Conversion(renamed, WeightRenaming(name, renamed), [(name, name)]))
    else:
        found.setdefault(renamed, Conversion(renamed, by_pattern[pattern])).parts.append((pattern, name))


def _lazy_results(module: PreTrainedModel, conversion: Conversion, source: WeightSource) -> dict[str, LazyTensor]:
    try:
        return cast(dict[str, LazyTensor], conversion.run(module, lambda name: LazyTensor.of(source, name)))
    except NotLazyError:
        return _whole_results(module, conversion, source)


def _whole_results(module: PreTrainedModel, conversion: Conversion, source: WeightSource) -> dict[str, LazyTensor]:
    """Return results of an operation without a lazy form: its parts are read in full whenever a box of a result is
    read."""

    def empty(name: str) -> Tensor:
        shape, dtype = source.spec(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def whole(name: str) -> Tensor:
        return source.read(name, tuple(slice(0, extent) for extent in source.spec(name)[0]))

    def lazy(result: str, like: Tensor) -> LazyTensor:
        def read(box: Box) -> Tensor:
            return cast(Tensor, conversion.run(module, whole)[result][box])

        return LazyTensor(like.shape, like.dtype, read)

    return {name: lazy(name, like) for name, like in conversion.run(module, empty).items()}
