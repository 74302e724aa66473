"""Memory of the host that other processes can map."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from hybrid_rl.errors import MemoryStateError

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load


class TensorRegion(ABC):
    """One range of addresses, filled with tensors one after the other. It is not thread-safe.

    `release` and `restore` let it sleep at one address; in between no process may use its tensors.

    tag: the name in errors. capacity_bytes: the most that can be allocated. device: of its tensors.
    """

    def __init__(self, tag: str, *, capacity_bytes: int, address: int, device: torch.device) -> None:
        self.tag = tag
        self.capacity_bytes = capacity_bytes
        self.device = device
        self._address = address
        self._num_bytes = 0
        self._closed = False
        self._released = False

    @property
    def num_bytes(self) -> int:
        """Bytes that its tensors take, including alignment."""
        return self._num_bytes

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of zeros, 64-byte aligned. Raises MemoryStateError if the capacity is used up."""
        self._require_open("allocated from")
        if self._released:
            raise MemoryStateError(f"region {self.tag!r} is asleep; wake it before allocating")
        num_elements = math.prod(shape)
        if num_elements == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        end = self._num_bytes + num_elements * dtype.itemsize
        if end > self.capacity_bytes:
            raise MemoryStateError(
                f"region {self.tag!r} holds {self._num_bytes} of {self.capacity_bytes} bytes; a tensor {shape} of "
                f"{dtype} does not fit; make the region with a larger capacity_bytes"
            )
        flat = self._tensor(self._num_bytes, num_elements, dtype)
        self._num_bytes = _round_up(end, ALIGNMENT_BYTES)
        return flat.view(shape)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of a tensor in the region, in bytes; None if any part of it is elsewhere, or if it has no
        elements."""
        self._require_open("searched")
        if tensor.numel() == 0 or tensor.device.type != self.device.type:
            return None
        # Strides count too: the extent runs from the first to the last element.
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = (sum((extent - 1) * stride for extent, stride in steps) + 1) * tensor.itemsize
        offset = tensor.data_ptr() - self._address
        return offset if offset >= 0 and offset + span <= self._num_bytes else None

    @property
    def is_asleep(self) -> bool:
        """Whether its memory has been released."""
        return self._released

    @property
    @abstractmethod
    def occupied_bytes(self) -> int:
        """Bytes of physical memory behind its addresses now."""

    def content(self) -> Tensor:
        """Return all its tensors as one: uint8 [num_bytes], a view."""
        self._require_open("read")
        if self._num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return self._tensor(0, self._num_bytes, torch.uint8)

    @abstractmethod
    def release(self) -> None:
        """Give the memory back; the content is lost, addresses stay. Idempotent. Raises MemoryStateError if the system
        refuses; the content is then undefined."""

    @abstractmethod
    def restore(self) -> None:
        """Have memory again, all zeros. Idempotent. Raises MemoryStateError if there is too little; it is then released
        as before."""

    @abstractmethod
    def close(self) -> None:
        """Release everything for good; idempotent."""

    @abstractmethod
    def _tensor(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor at an offset, in bytes, that keeps the memory there; of zeros if it is new."""

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise MemoryStateError(f"region {self.tag!r} is closed and cannot be {what}; make a new one")


class Region(TensorRegion):
    """Tensors in one shared mapping of an anonymous file (memfd), which other processes can map through `fd`.

    Its address range is reserved at once and its pages when they are first written, so an unused part costs nothing.
    """

    def __init__(self, tag: str, *, capacity_bytes: int) -> None:
        capacity_bytes = _round_up(max(1, capacity_bytes), mmap.PAGESIZE)
        self.fd = os.memfd_create(f"hybrid_rl_{tag}")
        self._close_file = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, capacity_bytes)
        self._mapping = mmap.mmap(self.fd, capacity_bytes, mmap.MAP_SHARED)
        address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        super().__init__(tag, capacity_bytes=capacity_bytes, address=address, device=torch.device("cpu"))

    @property
    def occupied_bytes(self) -> int:
        """Bytes of physical memory behind the mapping now, as the operating system counts them."""
        self._require_open("measured")
        return os.fstat(self.fd).st_blocks * 512

    def release(self) -> None:
        """Give its pages back, for all processes that map it; the content is lost, addresses stay. Idempotent.

        Raises MemoryStateError if the system refuses; the content is then undefined.
        """
        self._require_open("put to sleep")
        try:
            self._release_pages()
        except OSError as error:
            raise MemoryStateError(f"region {self.tag!r}: its pages could not be released ({error})") from error
        self._released = True

    def restore(self) -> None:
        """Have memory again, which reads zeros. Idempotent.

        Nothing can stop a process from using a tensor of a released region, but such a use takes pages: then it raises
        MemoryStateError, and stays released; after another `release` it can be restored.
        """
        self._require_open("woken")
        if self._released and (touched := self.occupied_bytes):
            raise MemoryStateError(
                f"region {self.tag!r} was used while it slept and takes {touched} bytes: reads gave zeros, and writes "
                f"are lost; lease it wherever it is used"
            )
        self._released = False

    def close(self) -> None:
        """Release everything for good; idempotent. Tensors that are still held read zeros; their addresses stay valid
        until the last of them is gone."""
        if self._closed:
            return
        self._release_pages()
        self._closed = True
        # Never mmap.close(): it would unmap under tensors that are still held.
        del self._mapping
        self._close_file()

    def _tensor(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        # A tensor holds the mapping, which therefore outlives the region while the tensor is in use.
        return torch.frombuffer(self._mapping, dtype=dtype, count=num_elements, offset=offset)

    def _release_pages(self) -> None:
        # MADV_DONTNEED would only drop the pages of this process; the file would keep them, and their content.
        if self._num_bytes:
            self._mapping.madvise(mmap.MADV_REMOVE, 0, _round_up(self._num_bytes, mmap.PAGESIZE))


def capacity_for(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that a region of copies of these tensors takes."""
    return sum(_round_up(tensor.nbytes, ALIGNMENT_BYTES) for tensor in tensors)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
