"""What FSDP2 allocates around the passes of a model: gathered weights, gradients on their way to their shards.

The order of training/sharding/fsdp.py and of torch's FSDPParamGroup: a unit per block and one for the rest. A unit is
gathered into one buffer and copied out of it; in the forward pass the buffer stays until the next unit was gathered, in
the backward pass the next unit is gathered while one computes. Gradients are copied into one buffer of reduce_dtype and
summed from there into shards; the buffer stays until the next unit is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.models.packed.repeated_layers import transformer_blocks
from hybrid_rl.planning.storages import LiveStorages
from hybrid_rl.training.sharding.fsdp import ShardOptions


def padded_numel(parameter: Tensor, num_shards: int) -> int:
    """Return the elements of a parameter whose first dim is filled up so that all shards are equally large."""
    if not parameter.dim():
        return num_shards
    return -(-parameter.shape[0] // num_shards) * num_shards * math.prod(parameter.shape[1:])


def units_of(module: PreTrainedModel) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Return the modules that are gathered as a whole, each with its parameters; the first is the root, with what is in
    no block."""
    blocks = transformer_blocks(module)
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in module.parameters() if id(p) not in inside]
    return [(module, rest), *((block, list(block.parameters())) for block in blocks)]


@dataclass
class _Unit:
    """A unit during a pass. gather_bytes, reduce_bytes: of its buffers."""

    parameters: list[nn.Parameter]
    gather_bytes: int
    reduce_bytes: int
    num_trained: int
    missing: int
    buffer: Tensor | None = None
    weights: Tensor | None = None
    accumulated: Tensor | None = None
    is_backward: bool = False
    is_reduced: bool = False


class ShardedPass:
    """Allocates on meta what FSDP2 would, from hooks around the blocks of a plain module.

    is_first: no gradients exist yet; else those of earlier micro-batches do, as shards with sync_every_micro_batch, or
    whole, and this is the last of them.
    """

    def __init__(self, module: PreTrainedModel, options: ShardOptions, live: LiveStorages, *, is_first: bool) -> None:
        self._options, self._live = options, live
        units = units_of(module)
        self._modules = [unit for unit, _ in units]
        self._units = [self._unit(parameters) for _, parameters in units]
        self._kept: Tensor | None = None  # the last buffer that was gathered into in the forward pass
        self._reducing: Tensor | None = None
        self._shards: list[Tensor] = []
        self._has_shards = not is_first and options.sync_every_micro_batch
        if self._has_shards and not options.cpu_offload:
            self._shards = [live.new(self._shard_bytes(unit), "gradients") for unit in self._units]
        if not is_first and not options.sync_every_micro_batch:
            for unit in self._units:
                size = sum(p.numel() for p in unit.parameters if p.requires_grad) * options.reduce_dtype.itemsize
                unit.accumulated = live.new(size, "gradients")

    def _unit(self, parameters: list[nn.Parameter]) -> _Unit:
        options = self._options
        trained = [p for p in parameters if p.requires_grad]
        gathered = sum(padded_numel(p, options.dp_shard) for p in parameters) * options.param_dtype.itemsize
        reduced = sum(padded_numel(p, options.dp_shard) for p in trained) * options.reduce_dtype.itemsize
        return _Unit(parameters, gathered, reduced, len(trained), len(trained))

    def _shard_bytes(self, unit: _Unit) -> int:
        per_element = self._options.master_dtype.itemsize / self._options.reduce_dtype.itemsize
        return int(unit.reduce_bytes / self._options.dp_shard * per_element)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Follow the passes inside the block."""
        hooks: list[Any] = []
        root, *blocks = self._units
        self._gather(root)
        self._copy_out(root, keep=True)
        for number, block in enumerate(self._modules[1:], 1):
            hooks.append(block.register_forward_pre_hook(self._before_forward(number)))
            hooks.append(block.register_forward_hook(self._after_forward(number)))
        for unit in self._units:
            hooks += [p.register_post_accumulate_grad_hook(self._gradient_of(unit)) for p in unit.parameters
                      if p.requires_grad]  # fmt: skip
        try:
            yield
            if root.missing < root.num_trained or any(unit.is_backward for unit in blocks):
                for unit in reversed(blocks):
                    self._after_backward(unit)
                self._after_backward(root)
        finally:
            for hook in hooks:
                hook.remove()

    def _gather(self, unit: _Unit) -> None:
        if unit.buffer is None and unit.weights is None:
            unit.buffer = self._live.new(unit.gather_bytes, "gathered")

    def _copy_out(self, unit: _Unit, *, keep: bool) -> None:
        if unit.weights is not None or unit.buffer is None:
            return
        if keep:
            self._kept = None
        unit.weights = self._live.new(unit.gather_bytes, "gathered")
        if keep:
            self._kept = unit.buffer
        unit.buffer = None

    def _before_forward(self, number: int) -> Any:
        def hook(*_: Any) -> None:
            self._gather(self._units[number])
            self._copy_out(self._units[number], keep=True)

        return hook

    def _after_forward(self, number: int) -> Any:
        unit = self._units[number]

        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if self._options.reshard_after_forward and not unit.is_backward:
                unit.weights = None
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(lambda gradient: self._before_backward(number))

        return hook

    def _before_backward(self, number: int) -> None:
        unit = self._units[number]
        if unit.is_backward:
            return
        unit.is_backward, self._kept = True, None
        self._gather(unit)
        self._copy_out(unit, keep=False)
        if number > 1:
            self._gather(self._units[number - 1])

    def _gradient_of(self, unit: _Unit) -> Any:
        def hook(parameter: nn.Parameter) -> None:
            unit.missing -= 1
            if unit.missing == 0 and unit is not self._units[0]:
                self._after_backward(unit)

        return hook

    def _after_backward(self, unit: _Unit) -> None:
        if unit.is_reduced:
            return
        unit.is_reduced = True
        options, live = self._options, self._live
        unit.weights = None
        self._reducing = None
        reducing = live.new(unit.reduce_bytes, "gradients")
        unit.accumulated = None
        for parameter in unit.parameters:
            parameter.grad = None
        shard = live.new(unit.reduce_bytes // options.dp_shard, "gradients")
        self._reducing = reducing
        if not self._has_shards and not options.cpu_offload:
            if options.reduce_dtype != options.master_dtype:
                shard = live.new(self._shard_bytes(unit), "gradients")
            self._shards.append(shard)
