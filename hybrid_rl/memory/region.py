"""Memory that can sleep and wake at the same address, so that pointers into it stay valid."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from typing import Literal

import psutil
import torch
from torch import Tensor

from hybrid_rl.errors import MemoryStateError, NotYetSupportedError

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load

SleepPolicy = Literal["discard", "offload"]


class Region:
    """Tensors whose memory is released and returned together, at a fixed address.

    On a CPU it is one shared mapping of an anonymous file (memfd), which other processes can map through `fd`. Its
    address range is reserved at once and its pages when they are first written, so an unused part costs nothing. It
    starts awake and is not thread-safe. Nothing can stop a tensor from being used while its region sleeps (it reads
    zeros), but such a use takes pages, which `wake` detects.

    tag: the name in errors.
    capacity_bytes: the most that can be allocated; None = the machine's memory.

    Raises NotYetSupportedError for a device other than the CPU.
    """

    def __init__(self, tag: str, *, capacity_bytes: int | None = None, device: torch.device | str = "cpu") -> None:
        if torch.device(device).type != "cpu":
            raise NotYetSupportedError(f"region {tag!r} on device={device}: regions are supported only on the CPU yet")
        self.tag = tag
        total = psutil.virtual_memory().total if capacity_bytes is None else capacity_bytes
        self.capacity_bytes = _round_up(max(1, total), mmap.PAGESIZE)
        self.fd = os.memfd_create(f"hybrid_rl_{tag}")
        self._close_file = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.capacity_bytes)
        self._mapping = mmap.mmap(self.fd, self.capacity_bytes, mmap.MAP_SHARED)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        self._num_bytes = 0
        self._asleep = False
        self._closed = False
        self._saved: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that its tensors take while awake, including alignment."""
        return self._num_bytes

    @property
    def occupied_bytes(self) -> int:
        """Bytes of physical memory behind the mapping now, as the operating system counts them."""
        self._require_open("measured")
        return os.fstat(self.fd).st_blocks * 512

    @property
    def is_asleep(self) -> bool:
        """Whether its memory has been released."""
        return self._asleep

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of zeros, 64-byte aligned, that keeps its address across sleep and wake.

        Raises MemoryStateError while asleep, or if the capacity is used up.
        """
        self._require_open("allocated from")
        if self._asleep:
            raise MemoryStateError(f"region {self.tag!r} is asleep; wake it before allocating")
        num_elements = math.prod(shape)
        if num_elements == 0:
            return torch.empty(shape, dtype=dtype)
        end = self._num_bytes + num_elements * dtype.itemsize
        if end > self.capacity_bytes:
            raise MemoryStateError(
                f"region {self.tag!r} holds {self._num_bytes} of {self.capacity_bytes} bytes; a tensor {shape} of "
                f"{dtype} does not fit; make the region with a larger capacity_bytes"
            )
        # A tensor holds the mapping, which therefore outlives the region while the tensor is in use.
        flat = torch.frombuffer(self._mapping, dtype=dtype, count=num_elements, offset=self._num_bytes)
        self._num_bytes = _round_up(end, ALIGNMENT_BYTES)
        return flat.view(shape)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a tensor in the file, in bytes; None if any part of it lies elsewhere, or if it has no
        elements."""
        self._require_open("searched")
        if tensor.numel() == 0 or tensor.device.type != "cpu":
            return None
        # Strides count too: the extent runs from the first to the last element.
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = (sum((extent - 1) * stride for extent, stride in steps) + 1) * tensor.itemsize
        offset = tensor.data_ptr() - self._address
        return offset if offset >= 0 and offset + span <= self._num_bytes else None

    def sleep(self, policy: SleepPolicy) -> None:
        """Release the memory. discard: the content is lost and reads zero after `wake`. offload: it returns with
        `wake`; on a CPU the copy takes as much memory as it frees, so there it exercises the code but saves nothing.

        Raises MemoryStateError while asleep, or if the system refuses; with offload everything is then unchanged.
        """
        self._require_open("put to sleep")
        if self._asleep:
            raise MemoryStateError(f"region {self.tag!r} is already asleep; wake it first")
        if policy not in ("discard", "offload"):
            raise ValueError(f"policy={policy!r} of region {self.tag!r} must be discard or offload")
        try:
            saved = self._mapping[: self._num_bytes] if policy == "offload" else None
        except MemoryError as error:
            raise MemoryStateError(
                f"region {self.tag!r}: no memory for a copy of its {self._num_bytes} bytes; it stays awake"
            ) from error
        try:
            self._release_pages()
        except OSError as error:
            if saved is None:
                raise MemoryStateError(
                    f"region {self.tag!r}: its pages could not be released ({error}); its content is undefined"
                ) from error
            self._mapping[: self._num_bytes] = saved
            raise MemoryStateError(
                f"region {self.tag!r}: its pages could not be released ({error}); it stays awake with its content"
            ) from error
        self._saved = saved
        self._asleep = True

    def wake(self) -> None:
        """Restore the memory at the same address: the saved content after offload, zeros after discard.

        Raises MemoryStateError while awake, and (once; it can then be woken) if it was used while asleep.
        """
        self._require_open("woken")
        if not self._asleep:
            raise MemoryStateError(f"region {self.tag!r} is already awake; put it to sleep first")
        if touched := self.occupied_bytes:
            self._release_pages()
            raise MemoryStateError(
                f"region {self.tag!r} was used while it slept and takes {touched} bytes: reads gave zeros, and writes "
                f"are lost; lease it wherever it is used"
            )
        if self._saved is not None:
            self._mapping[: self._num_bytes] = self._saved
            self._saved = None
        self._asleep = False

    def close(self) -> None:
        """Release everything for good; idempotent. Tensors that are still held read zeros; their addresses stay valid
        until the last of them is gone."""
        if self._closed:
            return
        self._release_pages()
        self._saved = None
        self._closed = True
        # Never mmap.close(): it would unmap under tensors that are still held.
        del self._mapping
        self._close_file()

    def _release_pages(self) -> None:
        # MADV_DONTNEED would only drop the pages of this process; the file would keep them, and their content.
        if self._num_bytes:
            self._mapping.madvise(mmap.MADV_REMOVE, 0, _round_up(self._num_bytes, mmap.PAGESIZE))

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise MemoryStateError(f"region {self.tag!r} is closed and cannot be {what}; make a new one")


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
