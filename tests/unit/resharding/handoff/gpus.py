"""A node of GPUs that is not there: tensors that say they lie on one, and CUDA's handles of memory between processes.

Ranks are threads. Their tensors hold host memory, so what is copied can be compared bit for bit; everything that would
reach CUDA is written down with the rank that asked for it. What would give a rank a context on a GPU other than its own
is an error at once.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.compat.torch import tree_map
from hybrid_rl.resharding.handoff import base, gpu_memory, message


class OnGpu(Tensor):
    """Host memory that says it lies on a GPU. What is made of it lies there too."""

    gpu: torch.device

    @property
    def device(self) -> torch.device:
        return self.gpu

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        devices = {a.gpu for a in args if isinstance(a, OnGpu)}
        assert len(devices) <= 1, f"{func} of tensors on {devices}"

        def placed(value: Any) -> Any:
            if isinstance(value, OnGpu) and devices:
                value.gpu = next(iter(devices))
            return value

        return tree_map(placed, found)


def on_gpu(tensor: Tensor, index: int) -> OnGpu:
    """The same memory as a tensor of GPU `index`."""
    found = tensor.as_subclass(OnGpu)
    found.gpu = torch.device("cuda", index)
    return found


def plain(tensor: Tensor | None) -> Tensor | None:
    """The same memory as what it is."""
    return None if tensor is None else tensor.as_subclass(Tensor)


class Node:
    """The GPUs, and what ranks did with them.

    numbering: for each rank the GPUs in the order in which its process counts them; a rank's own is the first that is
    given in `own`. no_access: pairs of GPUs that cannot read each other. expandable: ranks whose memory lies in
    expandable segments.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        numbering: Sequence[Sequence[str]],
        own: Sequence[str],
        *,
        no_access: Collection[frozenset[str]] = (),
        expandable: Collection[int] = (),
    ) -> None:
        self.numbering, self.own = numbering, own
        self._no_access, self._expandable = no_access, expandable
        self._here = threading.local()
        self._lock = threading.Lock()
        self.events: list[tuple[int, str, Any]] = []  # rank, what, of what
        self.exported: dict[bytes, tuple[str, Tensor]] = {}  # handle -> its GPU and memory
        self.counters: dict[bytes, int] = {}  # readers that PyTorch believes an exported tensor to have
        self._patch(monkeypatch)

    def enter(self, rank: int) -> torch.device:
        """Say which rank this thread is; its device."""
        self._here.rank = rank
        return self.device(rank)

    def device(self, rank: int) -> torch.device:
        """The own device of a rank, as its process counts."""
        return torch.device("cuda", self.numbering[rank].index(self.own[rank]))

    def note(self, what: str, of: Any = None) -> None:
        """Write down what this thread's rank does."""
        with self._lock:
            self.events.append((self._here.rank, what, of))

    def count(self, what: str) -> int:
        """How often it happened."""
        return sum(event == what for _, event, _ in self.events)

    # -------------------------------------------------------------------------------------------------- CUDA

    def _uuid(self, index: int) -> str:
        return self.numbering[self._here.rank][index]

    def _index(self, device: Any) -> int:
        if device is None:
            return self.device(self._here.rank).index
        return device if isinstance(device, int) else torch.device(device).index

    def _own_only(self, what: str, index: int) -> None:
        own = self.device(self._here.rank).index
        assert index == own, f"rank {self._here.rank}, whose GPU is {own}: {what} on GPU {index}"

    def _synchronise(self, device: Any = None) -> None:
        self._own_only("synchronise", self._index(device))
        self.note("synchronise")

    def _can_access(self, device: Any, peer: Any) -> bool:
        return frozenset((self._uuid(self._index(device)), self._uuid(self._index(peer)))) not in self._no_access

    def _snapshot(self) -> list[Mapping[str, Any]]:
        is_expandable = self._here.rank in self._expandable
        return [{"address": 0, "total_size": 1 << 62, "is_expandable": is_expandable}]

    def _reduce(self, tensor: Tensor) -> gpu_memory.Handle:
        """As PyTorch's: a function and fifteen arguments, of which the seventh is the device."""
        rank = self._here.rank
        self._own_only("export", tensor.device.index)
        self.note("export")
        memory = plain(tensor)
        assert memory is not None
        with self._lock:
            handle = b"%d" % len(self.exported)
            self.exported[handle] = self.own[rank], memory
            self.counters[handle] = 1
        geometry = (Tensor, tensor.shape, tensor.stride(), 0, torch.TypedStorage, tensor.dtype)
        storage = (tensor.device.index, handle, tensor.nbytes, 0, False)
        return self._rebuild, (*geometry, *storage, handle, 0, b"event", True)

    def _rebuild(self, *arguments: Any) -> Tensor:
        device, handle, waits_for_event = arguments[6], arguments[7], arguments[14]
        self._own_only("cudaIpcOpenMemHandle", device)
        assert not waits_for_event
        gpu, memory = self.exported[handle]
        visible = self.numbering[self._here.rank]
        if gpu not in visible or frozenset((gpu, self._uuid(device))) in self._no_access:
            raise RuntimeError("CUDA error: peer access is not supported between these two devices\nand more")
        self.note("open", gpu)
        return on_gpu(memory, device)

    def _release(self, handle: bytes, offset: int, device: Any = None) -> None:
        self.counters[handle] -= 1

    def _copy(self, kind: str) -> Any:
        copy_pieces = base.copy_pieces

        def copied(pieces: Any, sources: Any, destinations: Any, **options: Any) -> None:
            used = [sources[i] for i in set(pieces.source.tolist())]
            used += [destinations[i] for i in set(pieces.destination.tolist())]
            devices = {tensor.device for tensor in used}
            assert len(devices) == 1, devices
            device = devices.pop()
            if device.type == "cuda":
                self._own_only("launch", device.index)
                self.note(kind, device.index)
            copy_pieces(pieces, [plain(t) for t in sources], [plain(t) for t in destinations], **options)

        return copied

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError(f"another device is made the current one: {arguments}")

        cuda: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(self.numbering[self._here.rank]),
            "current_device": lambda: self._index(None),
            "get_device_properties": lambda device: SimpleNamespace(uuid=self._uuid(self._index(device))),
            "can_device_access_peer": self._can_access,
            "synchronize": self._synchronise,
            "memory_snapshot": self._snapshot,
            "get_allocator_backend": lambda: "native",
            "set_device": refuse,
            "device": refuse,
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", self._release)
        monkeypatch.setattr(gpu_memory, "reduce_tensor", self._reduce)
        for module, kind in ((base, "launch"), (message, "stage")):
            monkeypatch.setattr(module, "copy_pieces", self._copy(kind))
