"""Activations in host memory between the forward and the backward pass.

What autograd saves is copied to the host instead; weights and small tensors stay where they are. On CUDA the copies go
through pinned memory on a separate stream, during the computation, and the backward pass brings the next few
tensors back ahead of their use. On a CPU a copy is a copy in the same memory: correct, but useless.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid_rl.compat.torch import base_of, storage_id, version_of

SMALLEST_BYTES = 1024  # what is smaller costs more calls than it frees memory
NUM_AHEAD = 4  # tensors that the backward pass fetches before it needs them


def activations_on_host() -> AbstractContextManager[None]:
    """Keep activations of at least `SMALLEST_BYTES` that are saved inside the block in host memory."""
    offload = _Offload()
    return torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack)


class _Copy:
    """A saved tensor on the host, and on its device again once it was fetched. stream: None on a CPU."""

    def __init__(self, tensor: Tensor, stream: Any) -> None:
        self._device = tensor.device
        self._stream = stream
        self._fetched: Tensor | None = None
        self.was_taken = False
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)

    def fetch(self) -> None:
        """Start the copy back to the device."""
        if self._fetched is None:
            with torch.cuda.stream(self._stream):
                self._fetched = self._host.to(self._device, non_blocking=True)

    def take(self) -> Tensor:
        """Return the tensor on its device; it can be taken again."""
        self.fetch()
        assert self._fetched is not None
        tensor, self._fetched, self.was_taken = self._fetched, None, True
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)
        return tensor


class _Offload:
    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        # A tensor that several operations save is copied once. The weak reference keeps its key from being given to
        # another one.
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}
        self._stream: Any = None

    def pack(self, tensor: Tensor) -> Tensor | int:
        if _is_weight(tensor) or tensor.numel() * tensor.element_size() < SMALLEST_BYTES:
            return tensor
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (storage_id(tensor), version_of(tensor), *layout)
        if key in self._known and not self._known[key][0].expired():
            return self._known[key][1]
        if tensor.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._copies.append(_Copy(tensor, self._stream if tensor.device.type == "cuda" else None))
        self._known[key] = (StorageWeakRef(tensor.untyped_storage()), len(self._copies) - 1)
        return len(self._copies) - 1

    def unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = self._copies[packed].take()
        if self._stream is not None:  # the backward pass comes for them in reverse
            for copy in self._copies[max(0, packed - NUM_AHEAD) : packed]:
                if not copy.was_taken:  # an operation takes what it saved in order: nobody would take those again
                    copy.fetch()
        return tensor


def _is_weight(tensor: Tensor) -> bool:
    """Return whether it is a parameter, also a gathered one of a sharded model, or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)
