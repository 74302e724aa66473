"""Numbers of the host on their way to the device: what a pass needs travels together, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 256  # bytes: kernels are compiled once for tensors that begin at such addresses

Numbers = npt.NDArray[Any] | Sequence[int]


def reads_host_memory(device: torch.device) -> bool:
    """Return whether tensors of the device are tensors of the host: nothing is copied then."""
    return device.type == "cpu"


def staging(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate bytes of the host from which a copy to the device need not be waited for, uint8 [num_bytes], of any
    content.

    PyTorch gives pinned memory out again only after the copies from it have ended.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Tables:
    """Arrays that go to a device in one copy of pinned memory. On a CPU each is a tensor over its own memory at once.

    Arrays are added under a name, sent together, and read as tensors by their names from then on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._is_host = reads_host_memory(device)

    def add(self, name: str, array: Numbers, dtype: npt.DTypeLike = np.int64) -> None:
        """Put an array in the list of what is sent."""
        made = np.ascontiguousarray(array, dtype=dtype)
        if self._is_host:
            self._tensors[name] = torch.from_numpy(made)
        else:
            self._arrays[name] = made

    def send(self) -> None:
        """Copy what was added since the last time to the device, without waiting for it."""
        if not self._arrays:
            return
        starts, num_bytes = {}, 0
        for name, array in self._arrays.items():
            starts[name] = num_bytes
            num_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        host = staging(num_bytes, self._device)
        memory = host.numpy()
        for name, array in self._arrays.items():
            memory[starts[name] :][: array.nbytes] = array.reshape(-1).view(np.uint8)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        there.copy_(host, non_blocking=True)
        for name, array in self._arrays.items():
            part = there[starts[name] :][: array.nbytes]
            self._tensors[name] = part.view(torch.from_numpy(array.reshape(-1)[:0]).dtype).view(array.shape)
        self._arrays = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]
