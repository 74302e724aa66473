"""The same architecture without FSDP's hooks, for the in-place engine to decode from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_rl.compat.torch_fsdp import Destination, gathered_memory, parameters, units
from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.region import TensorRegion, capacity_for


class Twin:
    """A plain copy of a module's architecture that has no weights.

    While bound, its parameters are the very tensors that FSDP gathers (the full model, in the compute dtype) and its
    buffers the trainer's. Nothing is communicated while it runs, so ranks may run it unequally often. Made before the
    module is sharded, used afterwards; a gathered parameter is the same tensor object in every phase, at an address of
    the phase, or with `keep_addresses` always at one.

    reshard_after_forward: what FSDP does after the forward pass of a block outside these phases.
    """

    def __init__(self, module: PreTrainedModel, *, reshard_after_forward: bool = True) -> None:
        self._trained = module
        self._reshard_after_forward = reshard_after_forward
        # Weights are not copied: deepcopy finds a placeholder for each (one for tied ones) in its memo.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in module.parameters()
        }
        memo |= {id(buffer): buffer for buffer in module.buffers()}
        self.module: PreTrainedModel = copy.deepcopy(module, memo).eval()
        self._placeholders = dict(self.module.named_parameters(remove_duplicate=False))
        self.is_bound = False
        self._new_region: Callable[[int], TensorRegion] | None = None
        self._region: TensorRegion | None = None
        self._destinations: list[Destination] = []

    def keep_addresses(self, new_region: Callable[[int], TensorRegion]) -> None:
        """From now on gather into memory whose addresses stay, which is released between the phases: what a CUDA graph
        has captured over the twin stays valid. new_region: makes the region, for so many bytes, when it is first bound.

        Raises MemoryStateError if it is bound.
        """
        if self.is_bound:
            raise MemoryStateError("the full weights are gathered already; release them before choosing their memory")
        self._new_region = new_region

    def bind(self) -> None:
        """Gather all parameters and give them to the twin. Collective; the trainer's module may score but not train
        until `release`.

        Raises MemoryStateError if it is already bound, or if there is too little memory at the addresses that stay.
        """
        if self.is_bound:
            raise MemoryStateError("the full weights are gathered already; release them before binding them again")
        # Tensors made in inference mode could never be trained with.
        with torch.inference_mode(False), torch.no_grad():
            if self._new_region is not None:
                self._make_region(self._new_region)
            if self._region is not None:
                self._region.restore()
                for destination in self._destinations:
                    destination.exchange()
            self.is_bound = True
            for unit in units(self._trained):
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
        self._assign(dict(self._trained.named_parameters(remove_duplicate=False)))
        buffers = dict(self._trained.named_buffers(remove_duplicate=False))
        for name, module, own in _owners(self.module, buffers):
            setattr(module, own, buffers[name])

    def release(self) -> None:
        """Free the full weights and keep the shards. Does nothing if the twin is not bound."""
        if not self.is_bound:
            return
        self._assign(self._placeholders)
        for destination in self._destinations:
            destination.exchange()
        for unit in units(self._trained):
            unit.set_reshard_after_forward(self._reshard_after_forward and unit is not self._trained, recurse=False)
            unit.reshard()
        if self._region is not None:
            self._region.release()
        self.is_bound = False

    def _make_region(self, new_region: Callable[[int], TensorRegion]) -> None:
        """Make room for what FSDP gathers, whose sizes and dtypes it knows once it has gathered."""
        for unit in units(self._trained):
            unit.unshard()
        gathered = parameters(self._trained)
        like = [gathered_memory(parameter) for parameter in gathered]
        shapes = [(tuple(memory.shape), memory.dtype) for memory in like]
        num_bytes = capacity_for(like)
        for unit in units(self._trained):
            unit.reshard()
        region = new_region(num_bytes)
        memories = [region.allocate(*shape) for shape in shapes]
        self._destinations = [Destination(*pair) for pair in zip(gathered, memories, strict=True)]
        self._region, self._new_region = region, None

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Bind inside the block, and release after it; if already bound, change nothing."""
        if self.is_bound:
            yield
            return
        try:
            self.bind()
            yield
        finally:
            self.release()

    def _assign(self, values: dict[str, nn.Parameter]) -> None:
        for name, module, own in _owners(self.module, values):
            module._parameters[own] = values[name]


def _owners(root: nn.Module, names: Any) -> Iterator[tuple[str, nn.Module, str]]:
    for name in names:
        path, _, own = name.rpartition(".")
        yield name, root.get_submodule(path), own
