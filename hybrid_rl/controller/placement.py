"""Placement of ranks: their share of nodes, their order, their environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from hybrid_rl.errors import ConfigError, NoRoomError

LOOPBACK = "127.0.0.1"
# Ray then assigns GPUs, but leaves CUDA_VISIBLE_DEVICES alone (ray/_private/accelerators/nvidia_gpu.py).
SEE_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class RayOptions:
    """How the ranks of a group are placed and watched.

    placement: pack fills one node before the next, spread deals ranks out over the nodes. gpus_per_rank: 0 or 1.
    threads_per_rank: None shares the cores of a node between its ranks. env_vars: set in the process of every rank
    before it starts; they override what the library sets. start_seconds: for the cluster to give the resources, and for
    the processes to start. grace_seconds: for other ranks to end after a failure, before they are killed.
    watchdog_seconds: without progress on any rank, until a call counts as hung. collective_timeout: PyTorch's own limit
    for a collective; the watchdog comes first.
    """

    placement: Literal["pack", "spread"] = "pack"
    cpus_per_rank: float = 1.0
    gpus_per_rank: int = 0
    threads_per_rank: int | None = None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 120.0
    grace_seconds: float = 5.0
    watchdog_seconds: float = 1800.0
    collective_timeout: timedelta = timedelta(hours=2)


@dataclass(frozen=True)
class Node:
    """A machine of the cluster: its id, its address, and how much it has of each resource."""

    id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Place:
    """The place where the process of one bundle runs. address: of its node; interface: of that machine which has this
    address, empty if none has it. gpu: the place of its GPU among those that it sees, None for none; visible: its
    CUDA_VISIBLE_DEVICES, None if all are; is_here: whether it is the driver's node."""

    bundle: int
    node: str
    address: str
    host: str
    pid: int
    gpu: int | None = None
    visible: str | None = None
    interface: str = LOOPBACK
    is_here: bool = False


def bundle_of(options: RayOptions) -> dict[str, float]:
    """Return the resources that one rank takes of its node."""
    gpus = options.gpus_per_rank
    return {"CPU": options.cpus_per_rank} | ({"GPU": float(gpus)} if gpus else {})


def check_room(num_ranks: int, bundle: Mapping[str, float], nodes: Sequence[Node]) -> None:
    """Raise NoRoomError if the nodes, with nothing running on them, have no room for so many bundles."""
    room = sum(_bundles_that_fit(bundle, node.resources) for node in nodes)
    if room < num_ranks:
        has = "; ".join(f"{node.address}: {_amounts(node.resources, bundle)}" for node in nodes) or "no node"
        advice = "use num_ranks=auto for a rank per GPU, or device=cpu for ranks on CPU cores"
        raise NoRoomError(
            f"{num_ranks} ranks of {_amounts(bundle, bundle)} each do not fit into the cluster, which has room for "
            f"{room} ({has}); {advice if 'GPU' in bundle else 'ask for fewer ranks, less per rank, or add nodes'}"
        )


def rank_order(places: Sequence[Place]) -> list[Place]:
    """Sort places into the order of ranks: by node, GPU and bundle, so that neighbours are near each other and a
    restart on the same nodes gives the same order."""

    def key(place: Place) -> tuple[object, ...]:
        address = tuple(int(part) if part.isdigit() else part for part in place.address.split("."))
        gpu = -1 if place.gpu is None else place.gpu
        return tuple(str(part).zfill(3) for part in address), place.node, gpu, place.bundle

    return sorted(places, key=key)


def check_addresses(places: Sequence[Place]) -> None:
    """Raise ConfigError if ranks cannot meet at the address by which the cluster knows their node."""
    for place in places:
        if len(places) > 1 and not place.interface:
            raise ConfigError(
                f"ranks meet at the address that their node has in the cluster, and no network interface of "
                f"{place.host} has {place.address}; start Ray there with --node-ip-address= an address of an interface "
                f"(`ip address` lists them) that the other nodes reach"
            )


def rank_environment(options: RayOptions, cores: int, ranks_on_node: int) -> dict[str, str]:
    """Return the environment of a rank's process, complete before it starts: libraries read it when they are loaded.
    cores: of the node."""
    threads = options.threads_per_rank or max(1, cores // max(1, ranks_on_node))
    env = dict.fromkeys(THREAD_VARIABLES, str(threads))
    env["TOKENIZERS_PARALLELISM"] = "false"
    # A GPU rank sees all GPUs of its node and takes the one that Ray assigned. NCCL, CUDA IPC and vLLM's custom
    # all-reduce, which numbers the ranks of a replica as GPUs, all need to see their peers'. Other ranks see none: Ray
    # leaves them all.
    env |= {SEE_ALL: "1"} if options.gpus_per_rank else {"CUDA_VISIBLE_DEVICES": ""}
    return env | {name: str(value) for name, value in options.env_vars.items()}


def _bundles_that_fit(bundle: Mapping[str, float], resources: Mapping[str, float]) -> int:
    return int(min((resources.get(name, 0.0) // amount for name, amount in bundle.items() if amount), default=0))


def _amounts(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)
