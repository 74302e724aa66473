"""Host memory in which the bytes of sleeping residents wait."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.byte_sizes import size_text

ALIGNMENT_BYTES = 64  # of each tensor in a slot


class HostArena:
    """Host memory with a slot for each resident. A slot is made when its resident first goes to sleep, and kept: to pin
    memory takes longer than to fill it. It grows if the resident has grown.

    On CUDA slots are pinned and copies run on a stream of their own; on a CPU they are plain memory and plain copies.

    device: of the tensors that move. limit_bytes: the most that all slots together may take; None = no limit. It is not
    thread-safe.
    """

    def __init__(self, device: torch.device | str, limit_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self._slots: dict[str, _Slot] = {}
        self._copies = _CudaCopies(self.device) if self.device.type == "cuda" else _HostCopies()

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that all slots take; each is a whole number of pages."""
        return sum(slot.num_bytes for slot in self._slots.values())

    def slot_bytes(self) -> dict[str, int]:
        """Return bytes of host memory by resident."""
        return {tag: slot.num_bytes for tag, slot in self._slots.items()}

    def store(self, tag: str, tensors: Sequence[Tensor]) -> None:
        """Copy tensors into the slot of `tag`, over what it held. They may be freed or overwritten as soon as this
        returns.

        tensors: uint8 [num_bytes] each. Raises MemoryStateError if the slot would exceed the limit, or cannot be had.
        """
        places, num_bytes = _places(tensors)
        slot = self._slot(tag, num_bytes)
        with self._copies.out():
            for tensor, place in zip(tensors, places, strict=True):
                slot.bytes[place].copy_(tensor, non_blocking=True)

    def load(self, tag: str, tensors: Sequence[Tensor]) -> None:
        """Copy the bytes of `tag` back into tensors of the same sizes in the same order. The slot keeps its bytes.

        On CUDA the copies may still run after the return; what is launched on the current stream comes after them.
        """
        places, num_bytes = _places(tensors)
        slot = self._slots.get(tag)
        if slot is None or slot.used_bytes != num_bytes:
            held = "nothing" if slot is None else f"{slot.used_bytes} bytes"
            raise MemoryStateError(f"the arena holds {held} of {tag!r}, but {num_bytes} bytes were asked for")
        with self._copies.back():
            for tensor, place in zip(tensors, places, strict=True):
                tensor.copy_(slot.bytes[place], non_blocking=True)

    def close(self) -> None:
        """Release all slots; idempotent. What sleeps in them is lost."""
        self._copies.finish()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _slot(self, tag: str, num_bytes: int) -> _Slot:
        """Return the slot of `tag` with room for these bytes."""
        slot = self._slots.get(tag)
        if slot is not None and slot.num_bytes >= num_bytes:
            slot.used_bytes = num_bytes
            return slot
        wanted = _whole_pages(num_bytes)
        others = {other: size for other, size in self.slot_bytes().items() if other != tag}
        total = sum(others.values()) + wanted
        if self.limit_bytes is not None and total > self.limit_bytes:
            raise MemoryStateError(
                f"memory.host_memory is too small for {tag}: of it a rank may take {size_text(self.limit_bytes)}, but "
                f"needs {size_text(total)} so far ({_told(others | {tag: wanted})}); set it to at least {total} bytes "
                f"for each rank of a host, or name fewer residents in memory.offload"
            )
        if slot is not None:  # its resident is awake, so nobody needs the old bytes; old and new together might not fit
            self._copies.finish()
            self._slots.pop(tag).close()
            slot = None
        try:
            made = _Slot.of(wanted, pinned=self.device.type == "cuda")
        except (OSError, ValueError, RuntimeError) as error:
            raise MemoryStateError(
                f"{tag!r} cannot go to host memory: no {size_text(wanted)} to be had there ({error}), beside "
                f"{_told(others) or 'nothing else'}; name fewer residents in memory.offload, or use a machine with "
                f"more memory"
            ) from error
        made.used_bytes = num_bytes
        self._slots[tag] = made
        return made


@dataclass
class _Slot:
    """A mapping of whole pages. bytes: uint8 [num_bytes] over it; used_bytes: how many of them a resident takes."""

    bytes: Tensor
    unpin: weakref.finalize[..., _Slot] | None
    used_bytes: int = 0

    @classmethod
    def of(cls, num_bytes: int, *, pinned: bool) -> _Slot:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child process would share the pages, and the first write to each would then give this process another page
        # than the one that the device knows.
        mapping.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages; with them pages are had and pinned faster
            mapping.madvise(mmap.MADV_HUGEPAGE)
        content = torch.frombuffer(mapping, dtype=torch.uint8)
        slot = cls(content, None)
        if pinned:
            # PyTorch's own pinned memory comes in powers of two: up to twice what is asked for.
            torch.cuda.check_error(_cuda_runtime("cudaHostRegister")(content.data_ptr(), num_bytes, 0))
            slot.unpin = weakref.finalize(slot, _cuda_runtime("cudaHostUnregister"), content.data_ptr())
        return slot

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    def close(self) -> None:
        """Unpin. The mapping goes with the last tensor over it."""
        if self.unpin is not None:
            self.unpin()


def _cuda_runtime(name: str) -> Callable[..., int]:
    """Look up a function of CUDA's runtime, which a PyTorch without CUDA does not have."""
    return getattr(torch.cuda.cudart(), name)


class _HostCopies:
    """Copies of a CPU: done when they return."""

    @contextlib.contextmanager
    def out(self) -> Iterator[None]:
        yield

    back = out

    def finish(self) -> None:
        pass


class _CudaCopies:
    """Copies between the device and pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def out(self) -> Iterator[None]:
        """Copy what the current stream has written so far. The host waits, because it frees the tensors next, and other
        streams and libraries may be given their memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        """Copy while the host goes on.

        This is safe without a wait of the host. Memory that the tensors were just given may still be in use by work
        launched earlier on the current stream, whose allocator it comes from: the copies wait for that. All work on the
        tensors, the next time they are freed included, is launched on the current stream or on one that waits for it,
        and the current stream waits for the copies. The slot is overwritten by this stream alone, in order.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def finish(self) -> None:
        """Wait until no copy runs, before a slot is unpinned."""
        self._stream.synchronize()


def _places(tensors: Sequence[Tensor]) -> tuple[list[slice], int]:
    """Return where in a slot each tensor goes, and the bytes of all."""
    places, end = [], 0
    for tensor in tensors:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = start + tensor.numel()
        places.append(slice(start, end))
    return places, end


def _whole_pages(num_bytes: int) -> int:
    return -(-max(1, num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _told(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{tag} {size_text(size)}" for tag, size in sorted(sizes.items()))
