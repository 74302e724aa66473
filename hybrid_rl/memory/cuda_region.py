"""Memory of a GPU at addresses that stay, whatever sleeps and wakes: what CUDA graphs have captured stays valid."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hybrid_rl.memory.cuda_driver import OUT_OF_MEMORY, Driver, DriverError
from hybrid_rl.memory.region import TensorRegion

CHUNK_BYTES = 2**28  # of physical memory that is had in one piece


class CudaRegion(TensorRegion):
    """Tensors on a GPU, in physical memory that is mapped into a range of addresses by the driver.

    The addresses are reserved at once, memory is mapped as tensors are allocated, and `release` gives it back. A tensor
    must not be used until `restore`, nor after `close`: on a GPU such a use fails, and no later call of this process
    succeeds. If the last holder of a region, a tensor or the region itself, is gone, so is everything.

    capacity_bytes: of addresses, rounded up to whole pages of the device. device: of its tensors. chunk_bytes: physical
    memory is had in pieces of at most this. driver: None = that of CUDA.

    Raises MemoryStateError if the device or its driver cannot do this.
    """

    def __init__(
        self,
        tag: str,
        *,
        capacity_bytes: int,
        device: torch.device | str,
        chunk_bytes: int = CHUNK_BYTES,
        driver: Driver | None = None,
    ) -> None:
        device, ordinal = _with_index(torch.device(device))
        with _explained(tag, "cannot be made"):
            native = (driver or Driver()).new(ordinal, max(1, capacity_bytes), chunk_bytes)
        info = native.info()
        super().__init__(tag, capacity_bytes=info.capacity, address=info.address, device=device)
        self._native = native
        self._drop = weakref.finalize(self, native.drop)

    @property
    def occupied_bytes(self) -> int:
        """Bytes of physical memory behind the addresses now; 0 when closed."""
        return 0 if self._closed else self._native.info().mapped

    def release(self) -> None:
        """Wait for the device and give the memory back; the content is lost, addresses stay. Idempotent.

        Raises MemoryStateError if the driver refuses; it is then awake, and the content is lost.
        """
        self._require_open("put to sleep")
        if self._released:
            return
        with _explained(self.tag, "cannot sleep"):
            self._native.sleep()
        self._released = True

    def restore(self) -> None:
        """Have memory at the same addresses, all zeros. Idempotent.

        Raises MemoryStateError if there is too little memory; it is then released as before.
        """
        self._require_open("woken")
        if self._released:
            self._with_room(self._native.wake, "cannot wake")
            self._released = False

    def close(self) -> None:
        """Give the memory back for good; idempotent. The addresses stay reserved until the last tensor is gone.

        Raises MemoryStateError if the driver refuses; what it refused is tried again by the next call, and when the
        last holder is gone.
        """
        if self._closed:
            return
        with _explained(self.tag, "cannot be closed"):
            self._native.close()
        self._closed = True
        self._drop()

    def _tensor(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        num_bytes = num_elements * dtype.itemsize
        self._with_room(lambda: self._native.grow(offset + num_bytes), "cannot grow")
        return self._native.tensor(offset, num_bytes, self.device).view(dtype)

    def _with_room(self, call: Callable[[], None], what: str) -> None:
        """Make a call that takes memory; once more if PyTorch kept free what the device has not."""
        with _explained(self.tag, what, self.device):
            try:
                call()
            except DriverError as error:
                if error.code != OUT_OF_MEMORY or self.device.type != "cuda":
                    raise
                torch.cuda.empty_cache()
                call()


@contextmanager
def _explained(tag: str, what: str, device: torch.device | None = None) -> Iterator[None]:
    """Name the region in errors of the driver, and for lack of memory what is free on the device."""
    try:
        yield
    except DriverError as error:
        room = ""
        if error.code == OUT_OF_MEMORY and device is not None and device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            room = f"; {free} of {total} bytes are free on {device}"
        raise DriverError(f"region {tag!r} {what}: {error}{room}", error.code) from error


def _with_index(device: torch.device) -> tuple[torch.device, int]:
    """Return the device with its number, and the driver's number of it: that of PyTorch, which counts as CUDA does."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.device("cuda", index), index
    return device, 0
