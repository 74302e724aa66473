"""Handoff between processes of one node: an engine reads the trainer's shards where they lie.

Every trainer rank exports its shards once, as a description that pickles: on a CPU the memory file of a region and
offsets in it, on CUDA the handle of the storage. Whoever gets the descriptions of all ranks, a trainer rank or a
process that is none, maps them at first use and keeps them mapped: nothing is opened, copied or counted per handoff.
What is mapped is only read, in place: the copy kernel of the reader's device takes it from another GPU over the link
between the two and writes the engine's tensors. A rank may change its shards again when every participant has said
that it is through.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import socket
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.memory import Region
from hybrid_rl.memory.region import ALIGNMENT_BYTES
from hybrid_rl.resharding.handoff.base import (
    HOST,
    LOCAL,
    PEER,
    Delivered,
    Gather,
    Parts,
    PeerError,
    Source,
    alone,
    assembled,
    gathered,
    local_parts,
    pull,
)
from hybrid_rl.resharding.handoff.gpu_memory import (
    CannotShareError,
    Handle,
    check_readable,
    export_tensors,
    give_back,
    gpu_of,
    open_tensor,
)
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.plan import Plan

# Limits of this process or machine at which nothing more can be mapped, and what to do.
_LIMITS = {
    errno.EMFILE: "this process has too many open files; raise `ulimit -n`",
    errno.ENFILE: "this machine has too many open files; raise the sysctl fs.file-max",
    errno.ENOMEM: "no memory to map, or too many mappings; free some, or raise `ulimit -v` and the sysctl "
    "vm.max_map_count",
}


@dataclass(frozen=True)
class MemoryFile:
    """A memory file of another process, to be opened through /proc. device, inode: to know it again."""

    pid: int
    fd: int
    device: int
    inode: int
    num_bytes: int


@dataclass(frozen=True)
class ExportedTensor:
    """A contiguous tensor: `offset_bytes` into file number `file`; or, on CUDA, a handle and the GPU's uuid."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: int = -1
    offset_bytes: int = 0
    handle: Handle | None = None
    gpu: str = ""


@dataclass(frozen=True)
class Exported:
    """What a trainer rank offers: its part of every tensor of the layout, in that order; None if it has none of it.

    obstacle: why nobody else can map its memory; there are no tensors then.
    """

    rank: int
    files: tuple[MemoryFile, ...]
    tensors: tuple[ExportedTensor | None, ...]
    obstacle: str = ""

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs on which parts lie; an empty name stands for host memory."""
        return frozenset(tensor.gpu for tensor in self.tensors if tensor is not None)


class IpcExport:
    """The shards of this trainer rank, open to other processes of the node until `close`.

    tensors: name -> plain tensor or DTensor; for each tensor of the layout that this rank holds a part of. regions:
    where they lie. A part in host memory that lies in none of them, or that is not contiguous, is copied into a region
    of its own before every handoff; `copied_bytes` says how much that is. If memory of a GPU cannot be shared, the
    `exported` says why instead.

    Raises HandoffError if a tensor is missing or differs from the layout.
    """

    def __init__(
        self, layout: SourceLayout, rank: int, tensors: Mapping[str, Tensor], regions: Sequence[Region] = ()
    ) -> None:
        self.rank = rank
        self._layout = layout
        self._tensors = dict(tensors)
        parts = local_parts(self._layout, self.rank, self._tensors)
        outside = [
            number
            for number, part in enumerate(parts)
            if part is not None
            and part.device.type == "cpu"
            and (not part.is_contiguous() or all(region.offset_of(part) is None for region in regions))
        ]
        sizes = {number: _part(parts, number).nbytes for number in outside}
        self.copied_bytes = sum(sizes.values())
        self._copies: dict[int, Tensor] = {}
        self._own_region: Region | None = None
        if outside:
            capacity = sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes.values())
            self._own_region = Region("ipc_copies", capacity_bytes=capacity)
            for number in outside:
                part = _part(parts, number)
                self._copies[number] = self._own_region.allocate(tuple(part.shape), part.dtype)
        self._regions = [*regions, *([self._own_region] if self._own_region else [])]
        self._addresses = [None if part is None else part.data_ptr() for part in parts]
        self.parts: list[Tensor | None] = [self._copies.get(number, part) for number, part in enumerate(parts)]
        self._handles: dict[int, Handle] = {}
        self.exported = self._export()

    def refresh(self) -> None:
        """Make what others read the weights of now. Raises HandoffError where a tensor moved since it was exported."""
        parts = local_parts(self._layout, self.rank, self._tensors)
        for number, (part, address) in enumerate(zip(parts, self._addresses, strict=True)):
            if part is None:
                continue
            if number in self._copies:
                self._copies[number].copy_(part)
            elif part.data_ptr() != address:
                raise HandoffError(
                    f"rank {self.rank}: {self._layout.tensors[number].spec.name!r} has moved since it was exported, "
                    f"and other processes would read its old memory; export anew after rebinding a parameter"
                )

    def close(self) -> None:
        """Take back copies and handles. To be called when no participant reads any more; idempotent."""
        give_back(list(self._handles.values()))
        self.parts, self._copies, self._tensors, self._handles = [], {}, {}, {}
        if self._own_region is not None:
            self._own_region.close()

    def _export(self) -> Exported:
        on_gpus = {i: part for i, part in enumerate(self.parts) if part is not None and part.device.type == "cuda"}
        try:
            if on_gpus:
                self._handles = dict(zip(on_gpus, export_tensors(list(on_gpus.values())), strict=True))
            tensors = tuple(self._describe(number, part) for number, part in enumerate(self.parts))
        except CannotShareError as error:
            return Exported(self.rank, (), (), str(error))
        return Exported(self.rank, tuple(map(_file, self._regions)), tensors)

    def _describe(self, number: int, part: Tensor | None) -> ExportedTensor | None:
        if part is None:
            return None
        shape = tuple(part.shape)
        if number in self._handles:
            return ExportedTensor(shape, part.dtype, handle=self._handles[number], gpu=gpu_of(part.device))
        for file, region in enumerate(self._regions):
            offset = region.offset_of(part)
            if offset is not None:
                return ExportedTensor(shape, part.dtype, file=file, offset_bytes=offset)
        raise CannotShareError(f"a shard lies on {part.device}; use CPU or CUDA shards")


class IpcSource(Source):
    """The shards of all trainer ranks of this node, read in place. Every trainer rank has one, and so has a process
    that is none of them but holds an engine; it plans as one of the ranks of its host.

    exports: by rank; of ranks on other hosts None. own: this rank's export; None in a process that is no rank. device:
    where this process's engine lies; it is what reads the memory of other GPUs. gather: over all participants, trainer
    ranks first.
    """

    def __init__(
        self,
        layout: SourceLayout,
        exports: Sequence[Exported | None],
        *,
        own: IpcExport | None = None,
        device: torch.device | None = None,
        gather: Gather = alone,
    ) -> None:
        if len(exports) != len(layout.hosts):
            raise HandoffError(f"{len(exports)} ranks exported shards, but the layout has {len(layout.hosts)}")
        self._layout = layout
        self._exports = tuple(exports)
        self._own = own
        self._device = torch.device("cpu") if device is None else device
        self.waits_for = self._device
        self._gather = gather
        self._mapped: dict[int, list[Tensor | None]] = {}

    @classmethod
    def connect(
        cls, layout: SourceLayout, export: IpcExport, gather: Gather, device: torch.device | None = None
    ) -> IpcSource:
        """The source of a trainer rank among trainer ranks only. Collective."""
        host = layout.hosts[export.rank]
        answers = gathered(gather, (export.exported, host), "what each rank exports")
        exports = [exported if where == host else None for exported, where in answers]
        return cls(layout, exports, own=export, device=device, gather=gather)

    def layout(self) -> SourceLayout:
        """See Source."""
        return self._layout

    @property
    def exports(self) -> tuple[Exported | None, ...]:
        """What a process that is no rank needs beside layout and plan to read the same shards."""
        return self._exports

    def gather(self, value: Any) -> list[Any]:
        """See Source."""
        return self._gather(value)

    def prepare(self, version: int) -> None:
        """See Source."""
        super().prepare(version)
        if self._own is not None:
            self._own.refresh()

    def deliver(
        self, plan: Plan, destinations: Sequence[Tensor], *, hashes: Tensor | None = None, seeds: Tensor | None = None
    ) -> Delivered:
        """See Source: each rank reads for itself. Only what lies in host memory is staged on its way to a GPU."""
        return pull(plan, self.parts, destinations, self.link, hashes, seeds)

    def full(self, name: str) -> Tensor:
        """See Source; not collective."""
        device = next((part.device for part in self.held_parts() if part is not None), torch.device("cpu"))
        return assembled(self._layout, name, self.parts, device)

    def held(self) -> dict[int, Parts]:
        """See Source."""
        return {} if self._own is None else {self._own.rank: self._own.parts}

    def held_parts(self) -> Parts:
        """This rank's own parts; none in a process that is no rank."""
        return () if self._own is None else self._own.parts

    def close(self) -> None:
        """See Source. The memory of others is unmapped with the last tensor on it."""
        self._mapped = {}
        if self._own is not None:
            self._own.close()

    def link(self, rank: int) -> str:
        """The link over which this process reads the parts of a rank."""
        if self._own is not None and rank == self._own.rank:
            return LOCAL
        exported = self._exports[rank]
        if exported is None or exported.gpus <= {""}:
            return HOST
        return LOCAL if exported.gpus == {gpu_of(self._device)} else PEER

    def obstacle(self, rank: int) -> str:
        """What keeps this process from reading the parts of a rank; empty if nothing does. They are mapped then."""
        try:
            self._map(rank)
        except HandoffError as error:
            return str(error)
        return ""

    def parts(self, rank: int) -> Parts:
        """What a rank holds, mapped. Raises HandoffError if this process cannot read it, PeerError if its process is
        gone."""
        try:
            return self._map(rank)
        except CannotShareError as error:
            raise HandoffError(
                f"the shards of rank {rank} on {self._layout.hosts[rank]} cannot be read in place: {error}. Or have "
                f"them sent: rollout.transport=auto or distributed"
            ) from error

    def _map(self, rank: int) -> Parts:
        if self._own is not None and rank == self._own.rank:
            return self._own.parts
        if rank not in self._mapped:
            exported = self._exports[rank]
            if exported is None:
                raise CannotShareError("memory of another host cannot be mapped")
            if exported.obstacle:
                raise CannotShareError(exported.obstacle)
            for gpu in sorted(exported.gpus - {""}):
                check_readable(self._device, gpu)
            self._mapped[rank] = _open(exported, self._device)
        return self._mapped[rank]


def _part(parts: Parts, number: int) -> Tensor:
    part = parts[number]
    assert part is not None
    return part


def _file(region: Region) -> MemoryFile:
    status = os.fstat(region.fd)
    return MemoryFile(os.getpid(), region.fd, status.st_dev, status.st_ino, region.num_bytes)


def _open(exported: Exported, device: torch.device) -> list[Tensor | None]:
    """What another process exported, mapped; GPUs' memory for `device`. Raises PeerError if that process is gone,
    HandoffError if a limit of this one is reached, CannotShareError if CUDA cannot map it."""
    mappings = [_map(file, exported.rank) for file in exported.files]
    return [None if tensor is None else _opened(tensor, mappings, device) for tensor in exported.tensors]


def _map(file: MemoryFile, rank: int) -> mmap.mmap:
    path = f"/proc/{file.pid}/fd/{file.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _check_limits(error, path, rank)
        raise PeerError(
            f"the shards of rank {rank} cannot be opened at {path} ({error}): its process is gone, belongs to another "
            f"user, or lives in another container on {socket.gethostname()}; there use the distributed source"
        ) from error
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (file.device, file.inode) or not stat.S_ISREG(status.st_mode):
            raise PeerError(f"{path} is not what rank {rank} exported: its process is gone, or it exported anew")
        return mmap.mmap(fd, file.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        _check_limits(error, path, rank)
        raise
    finally:
        os.close(fd)  # mmap keeps a descriptor of its own


def _check_limits(error: OSError, path: str, rank: int) -> None:
    """Raises HandoffError where the fault is this process's own: its peers are there, and are to be told."""
    if error.errno in _LIMITS:
        raise HandoffError(
            f"the shards of rank {rank} cannot be mapped from {path} ({error}): {_LIMITS[error.errno]}"
        ) from error


def _opened(tensor: ExportedTensor, mappings: Sequence[mmap.mmap], device: torch.device) -> Tensor:
    if tensor.handle is not None:
        return open_tensor(tensor.handle, device)
    count = math.prod(tensor.shape)
    with warnings.catch_warnings():
        # torch warns that it cannot keep anybody from writing here; the system does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(mappings[tensor.file], dtype=tensor.dtype, count=count, offset=tensor.offset_bytes)
    return flat.view(tensor.shape)
