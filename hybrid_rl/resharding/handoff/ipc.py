"""Handoff between processes of one node: an engine reads the trainer's shards in place.

Every trainer rank exports its shards once, as a description that pickles: on a CPU the memory file of a region and
offsets in it, on CUDA the handle of the storage. A process with the descriptions
of all ranks, whether a trainer rank or not, maps them at first use and keeps them mapped: nothing is opened, copied or
counted per handoff. Mapped memory is only read, in place: the copy kernel of the reader's device takes it from another
GPU over the link between the two and writes the engine's tensors. A rank may change its shards again when every
participant has said that it is done.
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

import torch
from torch import Tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.memory.region import Region, capacity_for
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
    copy_shares,
    gathered,
    local_parts,
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
from hybrid_rl.resharding.rank_plan import Plan

# Limits of this process or machine that prevent further mappings, and what to do.
_LIMITS = {
    errno.EMFILE: "this process has too many open files; raise `ulimit -n`",
    errno.ENFILE: "this machine has too many open files; raise the sysctl fs.file-max",
    errno.ENOMEM: "no memory to map, or too many mappings; free some, or raise `ulimit -v` and the sysctl "
    "vm.max_map_count",
}


@dataclass(frozen=True)
class MemoryFile:
    """A memory file of another process, to be opened through /proc. device, inode: identify it."""

    pid: int
    fd: int
    device: int
    inode: int
    num_bytes: int


@dataclass(frozen=True)
class ExportedTensor:
    """A contiguous tensor: `offset_bytes` into file number `file`, or a handle of GPU memory. gpu: the uuid of the GPU,
    if it is on one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: int = -1
    offset_bytes: int = 0
    handle: Handle | None = None
    gpu: str = ""


@dataclass(frozen=True)
class Exported:
    """The export of a trainer rank: its part of every tensor of the layout, in that order; None if it has no part.

    obstacle: the reason why no other process can map its memory, with which there are no tensors; else empty.
    """

    rank: int
    files: tuple[MemoryFile, ...]
    tensors: tuple[ExportedTensor | None, ...]
    obstacle: str = ""

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs that hold parts; an empty name means host memory."""
        return frozenset(tensor.gpu for tensor in self.tensors if tensor is not None)


class IpcExport:
    """The shards of this trainer rank, open to other processes of the node until `close`.

    tensors: name -> plain tensor or DTensor, for each tensor of the layout that this rank holds a part of.
    regions: the host memory that holds them. A part in host memory outside all of them, or that is not contiguous, is
    copied into a separate region before every handoff; `copied_bytes` says how much that is. If memory of a GPU cannot
    be shared, `exported` gives the reason instead.

    Raises HandoffError if a tensor is missing or differs from the layout.
    """

    def __init__(
        self,
        layout: SourceLayout,
        rank: int,
        tensors: Mapping[str, Tensor],
        regions: Sequence[Region] = (),
    ) -> None:
        self.rank = rank
        self._layout = layout
        self._tensors = dict(tensors)
        parts = local_parts(self._layout, self.rank, self._tensors)
        outside = {
            number: part
            for number, part in enumerate(parts)
            if part is not None
            and part.device.type == "cpu"
            and (not part.is_contiguous() or all(region.offset_of(part) is None for region in regions))
        }
        self.copied_bytes = sum(part.nbytes for part in outside.values())
        self._copies: dict[int, Tensor] = {}
        self._own_region: Region | None = None
        if outside:
            self._own_region = Region("ipc_copies", capacity_bytes=capacity_for(outside.values()))
            for number, part in outside.items():
                self._copies[number] = self._own_region.allocate(tuple(part.shape), part.dtype)
        self._regions = [*regions, *([self._own_region] if self._own_region else [])]
        self._addresses = [None if part is None else part.data_ptr() for part in parts]
        self.parts: list[Tensor | None] = [self._copies.get(number, part) for number, part in enumerate(parts)]
        self._handles: dict[int, Handle] = {}
        self.exported = self._export()

    def refresh(self) -> None:
        """Copy current weights to where others read them. Raises HandoffError if an exported tensor has moved."""
        parts = local_parts(self._layout, self.rank, self._tensors)
        for number, (part, address) in enumerate(zip(parts, self._addresses, strict=True)):
            if part is None:
                continue
            if number in self._copies:
                self._copies[number].copy_(part)
            elif part.data_ptr() != address:
                raise HandoffError(
                    f"rank {self.rank}: {self._layout.tensors[number].spec.name!r} has moved since it was exported, "
                    f"so other processes would read its old memory; export again after rebinding a parameter"
                )

    def close(self) -> None:
        """Release copies and handles. Must be called only when no participant reads any more; idempotent."""
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
        raise CannotShareError(f"a shard is on {part.device}; use CPU or CUDA shards")


class IpcSource(Source):
    """The shards of all trainer ranks of this node, read in place. Every trainer rank has one; so may another process
    that holds an engine, which then plans like one of the ranks of its host.

    exports: by rank; None for ranks on other hosts.
    own: this rank's export; None in a process that is not a rank.
    device: of this process's engine; it reads the memory of other GPUs.
    gather: over all participants, trainer ranks first.
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
        self._layout = layout
        self._exports = tuple(exports)
        self._own = own
        self._device = torch.device("cpu") if device is None else device
        self.waits_for = self._device
        self.gather = gather
        self._mapped: dict[int, list[Tensor | None]] = {}

    @classmethod
    def connect(
        cls, layout: SourceLayout, export: IpcExport, gather: Gather, device: torch.device | None = None
    ) -> IpcSource:
        """Make the source of a trainer rank among trainer ranks only. Collective."""
        host = layout.hosts[export.rank]
        answers = gathered(gather, (export.exported, host), "what each rank exports")
        exports = [exported if theirs == host else None for exported, theirs in answers]
        return cls(layout, exports, own=export, device=device, gather=gather)

    def prepare(self, version: int) -> None:
        """Refresh this rank's export."""
        super().prepare(version)
        if self._own is not None:
            self._own.refresh()

    def deliver(self, plan: Plan, destinations: Sequence[Tensor]) -> Delivered:
        """Read the parts in place and write the engine, each rank for itself. Only host memory is staged for a GPU."""
        return Delivered.of(plan, destinations, *copy_shares(plan.shares, self.parts, destinations, self.link))

    def full(self, name: str) -> Tensor:
        """Assemble one tensor from the mapped parts; not collective."""
        own = () if self._own is None else self._own.parts
        device = next((part.device for part in own if part is not None), torch.device("cpu"))
        return assembled(self._layout, name, self.parts, device)

    def held(self) -> dict[int, Parts]:
        """Return this rank's own parts, by rank."""
        return {} if self._own is None else {self._own.rank: self._own.parts}

    def close(self) -> None:
        """Close the export. Memory of other ranks is unmapped with the last tensor on it."""
        self._mapped = {}
        if self._own is not None:
            self._own.close()

    def link(self, rank: int) -> str:
        """Return the link over which this process reads the parts of a rank."""
        if self._own is not None and rank == self._own.rank:
            return LOCAL
        exported = self._exports[rank]
        if exported is None or exported.gpus <= {""}:
            return HOST
        return LOCAL if exported.gpus == {gpu_of(self._device)} else PEER

    def obstacle(self, rank: int) -> str:
        """Map the parts of a rank; return the reason if this process cannot read them, else an empty text."""
        try:
            self._map(rank)
        except HandoffError as error:
            return str(error)
        return ""

    def parts(self, rank: int) -> Parts:
        """Return a rank's parts, mapped. Raises HandoffError if this process cannot read them, PeerError if the rank's
        process is gone."""
        try:
            return self._map(rank)
        except CannotShareError as error:
            raise HandoffError(
                f"the shards of rank {rank} on {self._layout.hosts[rank]} cannot be read in place: {error}. Or have "
                f"them sent: handoff.transport=auto or distributed"
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


def _file(region: Region) -> MemoryFile:
    status = os.fstat(region.fd)
    return MemoryFile(os.getpid(), region.fd, status.st_dev, status.st_ino, region.num_bytes)


def _open(exported: Exported, device: torch.device) -> list[Tensor | None]:
    """Map another process's export; memory of GPUs for `device`. Raises PeerError if that process is gone,
    HandoffError if a limit of this one is reached, CannotShareError if CUDA cannot map it."""
    mappings = [_map(file, exported.rank) for file in exported.files]
    return [None if tensor is None else _opened(tensor, mappings, device) for tensor in exported.tensors]


def _map(file: MemoryFile, rank: int) -> mmap.mmap:
    path = f"/proc/{file.pid}/fd/{file.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (file.device, file.inode) or not stat.S_ISREG(status.st_mode):
                raise PeerError(f"{path} is not what rank {rank} exported: its process is gone, or has exported again")
            return mmap.mmap(fd, file.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)  # mmap keeps its own descriptor
    except OSError as error:
        if error.errno in _LIMITS:  # a fault of this process: its peers still run, and must be informed
            raise HandoffError(
                f"the shards of rank {rank} cannot be mapped from {path} ({error}): {_LIMITS[error.errno]}"
            ) from error
        raise PeerError(
            f"the shards of rank {rank} cannot be opened at {path} ({error}): its process is gone, belongs to another "
            f"user, or runs in another container on {socket.gethostname()}; for that use the distributed source"
        ) from error


def _opened(tensor: ExportedTensor, mappings: Sequence[mmap.mmap], device: torch.device) -> Tensor:
    if tensor.handle is not None:
        return open_tensor(tensor.handle, device)
    count = math.prod(tensor.shape)
    with warnings.catch_warnings():
        # torch warns that it cannot keep this process from writing here; the system does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(mappings[tensor.file], dtype=tensor.dtype, count=count, offset=tensor.offset_bytes)
    return flat.view(tensor.shape)
