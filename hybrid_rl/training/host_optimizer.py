"""The optimizer of a model whose masters and Adam moments live in host memory, and are updated there.

Per parameter a device then holds its weight and its fp32 gradient, 6 bytes in bfloat16 instead of 18. At a step,
gradients come down and weights go up slice by slice, while the host updates the slice between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_rl.compat import native
from hybrid_rl.compat.torch import foreach_copy
from hybrid_rl.config import OptimizerConfig
from hybrid_rl.memory.region import capacity_for
from hybrid_rl.resharding.copy_tables import MAX_DIMS
from hybrid_rl.resharding.execute import HashedBoxes, hash_pieces, name_seed
from hybrid_rl.training.optimizer import HasGradient, Optimizer, follow, slices

HASHING = "strided_copy"  # the operator that hashes
STREAMED_ELEMENTS = 1 << 26  # gradients that come down in one slice, unless a tensor is larger


class HostOptimizer(Optimizer):
    """An Optimizer of plain parameters, with its state in host memory. Same arguments, results and state.

    The norm of the gradients, and their clipping, are computed on the device. fp32 parameters have masters here too,
    equal to them, which are no part of the state. Masters and moments are never copied as a whole, so they need not be
    pinned; what streams through is.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, *, num_optimizer_steps: int) -> None:
        super().__init__(module, config, num_optimizer_steps=num_optimizer_steps)
        parameters = list(self._parameters.values())
        device = parameters[0].device
        self._slices = list(slices(self._parameters, lambda name: self._parameters[name].numel(), STREAMED_ELEMENTS))
        most = max(sum(self._parameters[name].numel() for name in part) for part in self._slices)
        most_bytes = max(capacity_for(self._parameters[name] for name in part) for part in self._slices)
        is_pinned = device.type == "cuda"
        self._rooms = [
            _Room(
                torch.empty(most, dtype=torch.float32, pin_memory=is_pinned),
                torch.empty(most_bytes, dtype=torch.uint8, pin_memory=is_pinned),
            )
            for _ in range(2)
        ]
        self._down, self._up = _Lane(device), _Lane(device)
        self._seeds = torch.tensor([name_seed(name) for name in self.names], device=device)
        # Of the parameters as they were written last; None: to be compared number by number.
        self._known = self._hashes()

    def _make_targets(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.to("cpu", torch.float32, copy=True).contiguous() for name, t in local.items()}

    def _make_sums(self) -> Mapping[str, HasGradient]:
        # A gradient must be of its tensor's dtype and device.
        if not self._has_masters:
            return cast(Mapping[str, HasGradient], self._parameters)
        return {name: SimpleNamespace(grad=None) for name in self._parameters}

    def _collect(self) -> None:
        return

    def _apply(self) -> None:
        for lane in (self._down, self._up):
            lane.begin()
        coming = self._fetch(0)
        for number, part in enumerate(self._slices):
            following = self._fetch(number + 1)
            gradients, event = coming
            _wait(event)
            for name, gradient in gradients.items():
                self._targets[name].grad = gradient
            self._adamw.step()  # those without a gradient are left alone
            for name in gradients:
                self._targets[name].grad = None
            self._send(part, self._rooms[number % 2])
            coming = following
        for lane in (self._down, self._up):
            lane.end()
        self._known = self._hashes()

    def _fetch(self, number: int) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Start to copy the gradients of a slice to the host. Returns them by name, and the event when they are there;
        the host is done with what was in their room before."""
        if number >= len(self._slices):
            return {}, None
        there = {name: gradient for name in self._slices[number] if (gradient := self._sums[name].grad) is not None}
        here = self._rooms[number % 2].gradients(there.values())
        return dict(zip(there, here, strict=True)), self._down.copy(here, list(there.values()))

    def _send(self, part: Sequence[str], room: _Room) -> None:
        """Start to copy the weights of a slice to the device, each in its dtype: a copy that also rounds would do so on
        the host, in memory that is not pinned, and wait."""
        _wait(room.sent)
        masters, parameters = ([of[name].detach() for name in part] for of in (self._targets, self._parameters))
        rounded = room.weights(parameters)
        foreach_copy(rounded, masters)
        room.sent = self._up.copy(parameters, rounded)

    @torch.no_grad()
    def take_over(self) -> Tensor:
        """Same as Optimizer. Only parameters whose content has another hash than after the last step come to the host;
        it waits for the device once."""
        self.check()
        hashes = self._hashes()
        changed = torch.zeros(len(self.names), dtype=torch.bool)
        suspects = ~changed
        if hashes is not None and self._known is not None:
            suspects = (hashes != self._known).cpu()
        for number in suspects.nonzero()[:, 0].tolist():
            name = self.names[number]
            changed[number] = follow(self._targets[name], self._parameters[name].detach().cpu())
        self._known = hashes
        return changed if self._has_masters else changed[:0]

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Same as Optimizer. Weights that were loaded before count as changed since."""
        super().load_state_dict(state)
        self._known = None

    def _hashes(self) -> Tensor | None:
        """Compute the content hash of every parameter, int64 [P] on the device. None on a GPU without the compiled
        kernel: PyTorch's form takes many times the memory of a tensor."""
        if self._seeds.device.type == "cuda" and native.operator(HASHING, "cuda") is None:
            return None
        flat = [parameter.detach().reshape(-1) for parameter in self._parameters.values()]
        every, ones = np.arange(len(flat)), np.ones((len(flat), MAX_DIMS), dtype=np.int64)
        shape = ones.copy()
        shape[:, 0] = [len(tensor) for tensor in flat]
        zeros, dtypes = np.zeros_like(every), list(dict.fromkeys(tensor.dtype for tensor in flat))
        codes = np.array([dtypes.index(tensor.dtype) for tensor in flat])
        boxes = HashedBoxes(every, zeros, ones, shape, codes, every, zeros, ones)
        hashes = torch.zeros_like(self._seeds)
        hash_pieces(boxes, flat, dtypes, hashes=hashes, seeds=self._seeds)
        return hashes


@dataclass
class _Room:
    """Host memory that a slice streams through. down: float32; up: bytes; sent: when its weights have left."""

    down: Tensor
    up: Tensor
    sent: torch.cuda.Event | None = None

    def gradients(self, like: Iterable[Tensor]) -> list[Tensor]:
        """Return places for gradients of these shapes, float32."""
        places, start = [], 0
        for tensor in like:
            places.append(self.down[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        return places

    def weights(self, like: Iterable[Tensor]) -> list[Tensor]:
        """Return places for weights of these shapes and dtypes."""
        places, start = [], 0
        for tensor in like:
            places.append(self.up[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += capacity_for([tensor])
        return places


class _Lane:
    """Copies in one direction of the bus, beside what the device computes; on a CPU plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """Let copies wait for what the device was told to compute until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Start copies; return the event when they are done."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return None if self._stream is None else self._stream.record_event()

    def end(self) -> None:
        """Let the device wait for the copies before it computes on."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
