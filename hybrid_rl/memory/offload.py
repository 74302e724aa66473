"""Tensors that wait in host memory while they are not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_rl.errors import MemoryStateError
from hybrid_rl.memory.arena import HostArena
from hybrid_rl.memory.region import TensorRegion
from hybrid_rl.memory.residents import Resident


class OffloadedTensors:
    """The memory of some tensors, which sleeps in an arena and wakes in place: every tensor object, view and tied
    tensor stays valid. While it sleeps no tensor may be used.

    Memory of PyTorch's allocator is freed, and after `wake` may be at another address: who told it to another process
    tells it again. A region gives its pages back and keeps its address.

    tag: its name. tensors: returns the tensors, by name if errors shall name them; it is called at the start and before
    every sleep, so that state may be made later. DTensors count with this rank's part; tensors in host memory stay if
    the arena's device is another one, and regions with them. regions: those that hold some of the tensors; each goes as
    a whole.

    Raises MemoryStateError for a tensor whose memory cannot be freed; also `sleep`, if it came later.
    """

    def __init__(
        self,
        tag: str,
        tensors: Callable[[], Sequence[Tensor] | Mapping[str, Tensor]],
        arena: HostArena,
        regions: Iterable[TensorRegion] = (),
    ) -> None:
        self.tag = tag
        self._tensors, self._arena, self._regions = tensors, arena, tuple(regions)
        # What sleeps, with its bytes; None: it is awake.
        self._asleep: _Memory | None = None
        self._memory()

    @property
    def is_asleep(self) -> bool:
        """Whether its bytes are in the arena only."""
        return self._asleep is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes while awake."""
        return (self._asleep or self._memory(is_checked=False)).num_bytes

    def resident(self) -> Resident:
        """Make its resident."""
        starts_awake = not self.is_asleep
        return Resident(self.tag, lambda: self.num_bytes, self.sleep, self.wake, starts_awake=starts_awake, atomic=True)

    def sleep(self, tags: frozenset[str] = frozenset()) -> None:
        """Copy its bytes to the arena and free its memory. tags: not used; residents give them.

        Raises MemoryStateError while asleep, and for lack of host memory; then, as after any error, it is awake.
        """
        if self._asleep is not None:
            raise MemoryStateError(f"{self.tag!r} is already asleep; wake it first")
        memory = self._memory()
        self._arena.store(self.tag, memory.flat())
        self._asleep = memory
        try:
            memory.release()
        except BaseException:
            self.wake()
            raise

    def wake(self) -> None:
        """Take memory again and copy its bytes back; on CUDA what is launched on the current stream comes after that.

        Raises MemoryStateError while awake, or if a region was used while it slept, and what the allocator raises
        (RuntimeError, of which OutOfMemoryError is one); it is then asleep, with its bytes in the arena.
        """
        memory = self._asleep
        if memory is None:
            raise MemoryStateError(f"{self.tag!r} is already awake; put it to sleep first")
        try:
            memory.take()
            self._arena.load(self.tag, memory.flat())
        except BaseException:
            memory.release()
            raise
        self._asleep = None

    def _memory(self, *, is_checked: bool = True) -> _Memory:
        tensors = self._tensors()
        named = (
            tensors.items() if isinstance(tensors, Mapping) else ((f"tensor {at}", t) for at, t in enumerate(tensors))
        )
        storages: dict[int, torch.UntypedStorage] = {}
        regions: list[TensorRegion] = []
        for name, tensor in named:
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            if local.device.type == "cpu" != self._arena.device.type:
                continue
            region = next((region for region in self._regions if region.offset_of(local) is not None), None)
            if region is not None:
                regions += [] if region in regions else [region]
                continue
            storage = local.untyped_storage()
            if storage.nbytes() == 0:
                continue
            if is_checked and (problem := self._problem(local, storage)):
                raise MemoryStateError(
                    f"{name} of {self.tag!r} ({tuple(local.shape)} of {local.dtype}) cannot sleep: {problem}"
                )
            storages.setdefault(storage.data_ptr(), storage)
        return _Memory(list(storages.values()), regions)

    def _problem(self, tensor: Tensor, storage: torch.UntypedStorage) -> str | None:
        if tensor.device.type != self._arena.device.type:
            return f"it is on {tensor.device}, not on {self._arena.device}; load its weights there first"
        if not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared()):
            return (
                "its memory belongs to others too (a mapped file, NumPy since .numpy() was called on it, another "
                "process, or a region that was not named); give it its own with "
                "hybrid_rl.memory.offload.own_memory(module)"
            )
        return None


class _Memory:
    """Distinct storages and regions, awake or asleep."""

    def __init__(self, storages: list[torch.UntypedStorage], regions: list[TensorRegion]) -> None:
        self._sized = [(storage, storage.nbytes()) for storage in storages]
        self._regions = regions
        self.num_bytes = sum(size for _, size in self._sized) + sum(region.num_bytes for region in regions)

    def flat(self) -> list[Tensor]:
        """Return all of it, uint8 [num_bytes] each."""
        # Tensors of their own: a copy into them raises no version counter, so autograd sees no change.
        tensors = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s, _ in self._sized]
        return tensors + [region.content() for region in self._regions]

    def release(self) -> None:
        """Free what is not free yet. Regions first, because these may fail."""
        for region in self._regions:
            region.release()
        for storage, _ in self._sized:
            storage.resize_(0)

    def take(self) -> None:
        """Take what is not taken yet."""
        for region in self._regions:
            region.restore()
        for storage, size in self._sized:
            storage.resize_(size)


@torch.no_grad()
def own_memory(module: nn.Module) -> None:
    """Give parameters and buffers in host memory that is not PyTorch's (a mapped file, NumPy) memory that is, with the
    same values; parameter objects, views of one storage and tied tensors stay what they are. Shards are left alone."""
    made: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != "cpu" or isinstance(tensor, DTensor):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.resizable():
            continue
        key = storage.data_ptr()
        if key not in made:
            made[key] = torch.empty(storage.nbytes(), dtype=torch.uint8)
            made[key].untyped_storage().copy_(storage)
        own = made[key].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype).set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = view
