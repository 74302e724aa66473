"""The weights of a model, made once for it: what is trained of them, what a checkpoint holds, and what engines get.

Whoever holds them need not know whether the model has adapters: `ModelWeights` are those of one that has none,
`AdaptedWeights` those of one that has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.errors import CheckpointError
from hybrid_rl.models.lora.factors import low_rank_changes
from hybrid_rl.models.lora.folder import AdapterSource, is_adapter_folder, load_adapter, save_adapter, stored_parameters
from hybrid_rl.models.lora.inject import init_adapters, is_adapter_name
from hybrid_rl.models.recipe import ModelRecipe, build_on_meta, check_parameters
from hybrid_rl.models.saving import save_weights
from hybrid_rl.process.files import Sink
from hybrid_rl.weights.loading import load_weights, materialise
from hybrid_rl.weights.low_rank import LowRank
from hybrid_rl.weights.plain import is_adapted, plain, wrappers
from hybrid_rl.weights.sources import FolderSource, ObjectSource, WeightSource, named_weights

Tensors = dict[str, Tensor]  # by name


class ModelWeights:
    """The weights of a module. trains: what a run trains of them, for errors. is_frozen: whether gradients pass
    through them and none of them learns."""

    trains, is_frozen, _in_adapter_folders = "trains all weights", False, False

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module

    def masters(self) -> Iterable[nn.Parameter]:
        """Return the parameters whose shards are masters; others are sharded in the dtype that they are in."""
        return self._module.parameters()

    def stored(self) -> Iterable[nn.Parameter]:
        """Return the parameters that a checkpoint holds."""
        return self._module.parameters()

    def merged(self) -> AbstractContextManager[None]:
        """Inside the block the module is the one of an engine: without adapters, but with what is trained whole."""
        return plain(self._module)

    def changes(self, dtype: torch.dtype) -> dict[str, LowRank]:
        """Return what adapters add, by the names of an engine. dtype: in which the module computes. Collective."""
        return low_rank_changes(self._module, dtype)

    def moving(self) -> Tensors:
        """Return the weights that may differ from version to version, by the names of the module."""
        return named_weights(self._module)

    def version(self, dtype: torch.dtype) -> tuple[Tensors, Tensors, dict[str, LowRank]]:
        """Return the present version for an engine without adapters: weights that may differ from version to version,
        weights that never do, and what adapters add. dtype: in which the module computes. Collective."""
        return self.moving(), {}, {}

    def shared(self, put: Callable[[np.ndarray], Any]) -> ModelRecipe:
        """Put the weights into a store that processes share, and return the recipe to build the model from it. put:
        returns an array's handle, such as ray.put. Raises ModelError if its class and config make another model."""
        module = self._module
        with plain(module, trained=False):
            recipe = ModelRecipe.of_module(module, ObjectSource.of(module, put))
            check_parameters(module, build_on_meta(recipe, module.dtype))
        return recipe

    def fill(self, source: WeightSource, device: torch.device, seed: int, adapter: WeightSource | None) -> None:
        """Load the weights of a module on meta. seed: of new adapters; adapter: what they begin with instead."""
        load_weights(self._module, source, device)

    def save(self, folder: Path, dtype: torch.dtype, base: str | None, is_writer: bool, sink: Sink | None) -> None:
        """Write what is trained into a folder. base: where the rest is. Other arguments, and who calls it, as in
        `save_weights`."""
        save_weights(self._module, folder, dtype, is_writer=is_writer, sink=sink)

    def save_merged(self, folder: Path, dtype: torch.dtype, *, is_writer: bool) -> None:
        """Write the model without adapters that computes the same. Collective."""
        changes = self.changes(dtype)
        with self.merged():
            save_weights(self._module, folder, dtype, is_writer=is_writer, changes=changes)

    def load(self, folder: Path, device: torch.device) -> None:
        """Take what `save` has written, into the memory that is there. Raises CheckpointError if the run of the folder
        trained something else, ModelError if the weights do not fit."""
        if is_adapter_folder(folder) != self._in_adapter_folders:
            raise CheckpointError(
                f"this run {self.trains}, and the run of {folder} did not; give the same keys of lora to resume that "
                "run, or begin a new one from its weights (model.path)"
            )
        self._load(folder, device)

    def _load(self, folder: Path, device: torch.device) -> None:
        load_weights(self._module, FolderSource(str(folder)), device)


class AdaptedWeights(ModelWeights):
    """The weights of a module with adapters, which alone are trained, with what is trained whole."""

    trains, is_frozen, _in_adapter_folders = "trains adapters (lora.r)", True, True

    def masters(self) -> Iterable[nn.Parameter]:
        return (parameter for parameter in self._module.parameters() if parameter.requires_grad)

    def stored(self) -> Iterable[nn.Parameter]:
        return stored_parameters(self._module).values()

    def moving(self) -> Tensors:
        buffers = dict(self._module.named_buffers())
        weights = named_weights(self._module)
        return {name: tensor for name, tensor in weights.items() if is_adapter_name(name) or name in buffers}

    def version(self, dtype: torch.dtype) -> tuple[Tensors, Tensors, dict[str, LowRank]]:
        with self.merged():
            weights = named_weights(self._module)
        trains_whole = any(hasattr(wrapper, "modules_to_save") for _, _, wrapper in wrappers(self._module))
        return (*((weights, {}) if trains_whole else ({}, weights)), self.changes(dtype))

    def shared(self, put: Callable[[np.ndarray], Any]) -> ModelRecipe:
        adapter = ObjectSource.of_tensors(stored_parameters(self._module), put)
        return replace(super().shared(put), adapter=adapter)

    def fill(self, source: WeightSource, device: torch.device, seed: int, adapter: WeightSource | None) -> None:
        with plain(self._module, trained=False):
            super().fill(source, device, seed, adapter)
        materialise(self._module, device)
        init_adapters(self._module, seed)
        if adapter is not None:
            load_adapter(self._module, adapter)

    def save(self, folder: Path, dtype: torch.dtype, base: str | None, is_writer: bool, sink: Sink | None) -> None:
        save_adapter(self._module, folder, dtype, base=base, is_writer=is_writer, sink=sink)

    def _load(self, folder: Path, device: torch.device) -> None:
        load_adapter(self._module, AdapterSource(str(folder)))


def weights_of(module: PreTrainedModel) -> ModelWeights:
    """Return the weights of a module as it is now."""
    return (AdaptedWeights if is_adapted(module) else ModelWeights)(module)
