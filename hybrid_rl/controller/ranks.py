"""Per-rank context, choice of GPU, and process-group setup."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hybrid_rl.controller.mesh import RankMesh
from hybrid_rl.errors import ConfigError

CPU = torch.device("cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"

# The device that `take_device` has taken in this process, if it is the process of a rank, and the id of the GPU.
_taken: tuple[torch.device, str] = (CPU, "")


def _itself(value: Any) -> Any:
    return value


def _alone(value: Any) -> list[Any]:
    return [value]


def gpu_place(gpu_ids: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Return the place of a rank's GPU among those of its process, None for a rank without one.

    gpu_ids: of the GPUs that the cluster gave the rank, as CUDA_VISIBLE_DEVICES names them (numbers, UUIDs, MIG
    instances), or numbers of the machine if nothing restricts them. Raises ConfigError unless it is one GPU, among
    those that the process sees: those before the first entry that names none (CUDA programming guide, environment
    variables).
    """
    if not gpu_ids:
        return None
    mine, restriction = gpu_ids[0].strip(), environment.get(VISIBLE, "").strip()
    if len(gpu_ids) == 1 and not restriction and not mine.isdecimal():
        raise ConfigError(
            f"this rank was given GPU {mine} by name, but {VISIBLE} is not set for it, so that its place is unknown; "
            f"set {VISIBLE} to the names of the GPUs (nvidia-smi -L shows them) for the program that starts Ray, on "
            f"every node"
        )
    entries = [name.strip() for name in restriction.split(",")]
    visible = [*itertools.takewhile(re.compile(r"\d+$|GPU-|MIG-").match, entries)]
    if len(gpu_ids) > 1 or (restriction and mine not in visible):
        raise ConfigError(
            f"this rank was given the GPUs {', '.join(gpu_ids)}, and {VISIBLE}={environment.get(VISIBLE)!r}; a rank "
            f"has one GPU, which it must see: set {VISIBLE} for the program that starts Ray only"
        )
    return visible.index(mine) if restriction else int(mine)


def take_device(gpu_ids: Sequence[str]) -> torch.device:
    """Make the GPU that the cluster gave this rank the current device; the CPU for a rank without one. The first thing
    that a rank does: whatever touches CUDA before does so on the first GPU of the machine, as all other ranks.

    All GPUs of the machine stay visible, so that ranks can reach each other's memory. Of MIG instances, however, a
    process can use only one (NVIDIA's MIG guide, CUDA device enumeration): it then sees only its own.

    Raises ConfigError for a GPU that PyTorch does not find.
    """
    global _taken
    place = gpu_place(gpu_ids, os.environ)
    if place is None:
        _taken = (CPU, "")
        return CPU
    if gpu_ids[0].startswith("MIG"):
        os.environ[VISIBLE], place = gpu_ids[0], 0
    num_devices = torch.cuda.device_count()
    if place >= num_devices:
        raise ConfigError(
            f"this rank was given GPU {gpu_ids[0]}, and PyTorch finds {num_devices} here ({VISIBLE}="
            f"{os.environ.get(VISIBLE)!r}); start Ray with as many GPUs as there are, and check nvidia-smi's output"
        )
    _taken = (torch.device("cuda", place), gpu_ids[0])
    enter_device()
    return _taken[0]


def enter_device() -> None:
    """Make the rank's GPU the current device of the calling thread: PyTorch's threads begin with the first one of the
    machine. Does nothing on CPUs, and in a process that is not a rank's."""
    if _taken[0].type == "cuda":
        torch.cuda.set_device(_taken[0])


def child_environment() -> dict[str, str]:
    """Return the environment variables for a process that this rank starts: it sees only the rank's GPU."""
    return {VISIBLE: _taken[1]} if _taken[0].type == "cuda" else {}


@dataclass(frozen=True)
class RankContext:
    """Everything that a rank gets to build its worker; by default the only rank, on the CPU.

    gather: the objects of all ranks, in rank order, on every rank; all ranks must call it. get: the object of a
    handle of the object store; in one process an object is its own handle.

    Ranks that differ only on other axes than the data axes of the mesh have the same samples (`RankMesh`). Whatever is
    counted, summed or measured over samples goes by data ranks.
    """

    role: str = "policy"
    rank: int = 0
    mesh: RankMesh = RankMesh()
    device: torch.device = CPU
    gather: Callable[[Any], list[Any]] = _alone
    get: Callable[[Any], Any] = _itself

    @property
    def num_ranks(self) -> int:
        """Ranks of the role."""
        return self.mesh.num_ranks

    @property
    def num_data_ranks(self) -> int:
        """Parts into which a batch is split."""
        return self.mesh.num_data_ranks

    @property
    def data_rank(self) -> int:
        """The part of a batch that this rank has, from 0."""
        return self.mesh.data_rank(self.rank)

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank reports for its samples: one of those that have the same ones."""
        return self.rank in self.mesh.data_leaders

    def data_gather(self, value: Any) -> list[Any]:
        """Return one object for each part of the batch, in order, the same on every rank. All ranks must call it."""
        everywhere = self.gather(value)
        return [everywhere[rank] for rank in self.mesh.data_leaders]


def interface_of(address: str) -> str:
    """Return the name of the network interface of this machine that has an address; empty if none has it. Of the
    loopback interface every address of 127.0.0.0/8 is one."""
    try:
        wanted = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(address, None)}
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        for known in addresses:
            if known.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_address(known.address)
                if own in wanted or any(own.is_loopback and other.is_loopback for other in wanted):
                    return name
    return ""


def use_interface(address: str) -> None:
    """Have gloo and NCCL listen on the interface with this address, unless the environment names another one. By
    themselves they take one that the host's name leads to, which may be the loopback (gloo), or the first one (NCCL),
    and other hosts do not reach these."""
    name = interface_of(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without = any that begins so


def open_store(host: str, timeout: timedelta) -> tuple[dist.TCPStore, int]:
    """Open the store through which ranks find each other. Returns it and its port, a free one that no other process can
    take in between.

    It listens on `host` only; the one that PyTorch makes would listen on every interface.
    """
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    return store, port


def join_ranks(store: dist.Store, rank: int, num_ranks: int, device: torch.device, timeout: timedelta) -> None:
    """Set up torch.distributed in this process: gloo on CPUs, with NCCL in addition on CUDA."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def object_gather(num_ranks: int, timeout: timedelta) -> Callable[[Any], list[Any]]:
    """Return `RankContext.gather` over all ranks, on a separate group: it meets no collective of the worker."""
    if num_ranks == 1:
        return _alone
    return partial(_gather_objects, dist.new_group(backend="gloo", timeout=timeout))


def _gather_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, value, group=group)
    return objects


class BlockGather:
    """Gathers like `RankContext.gather`, but among each `size` consecutive ranks (a tensor-parallel replica, say): the
    objects of the block that this rank is in. Making it is collective over all ranks.

    Raises ConfigError if the ranks cannot be cut into such blocks.
    """

    def __init__(self, size: int) -> None:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks % size:
            raise ConfigError(f"{num_ranks} ranks cannot be cut into blocks of {size}; use a divisor of num_ranks")
        self._size = size
        self._group = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None

    def __call__(self, value: Any) -> list[Any]:
        """Return the objects of the block, in rank order."""
        return [value] if self._group is None else _gather_objects(self._group, value)

    def numbers(self, values: Sequence[int]) -> list[list[int]]:
        """Gather equally many 64-bit integers of each rank: one message, and nothing is pickled."""
        if self._group is None:
            return [list(values)]
        numbers = torch.empty(self._size * len(values), dtype=torch.int64)
        dist.all_gather_into_tensor(numbers, torch.tensor(values, dtype=torch.int64), group=self._group)
        rows: list[list[int]] = numbers.view(self._size, -1).tolist()
        return rows


def leave_ranks() -> None:
    """Shut down torch.distributed in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
