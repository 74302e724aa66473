"""Ranks as Ray actors, in a cluster that is started here or was there before. The only file that imports ray."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import psutil
import ray
import torch
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybrid_rl.compat import ray as ray_names
from hybrid_rl.controller import placement, session
from hybrid_rl.controller.failures import cluster_ended, failure_of, node_lost, process_ended
from hybrid_rl.controller.placement import LOOPBACK, Node, Place, RayOptions
from hybrid_rl.controller.processes import describe_process, end_family, end_processes, family, is_running
from hybrid_rl.controller.server import Health, Outcome, RankServer
from hybrid_rl.errors import ConfigError, HybridRLError, NoRoomError, WorkerError
from hybrid_rl.process.cores import own_cores
from hybrid_rl.process.environment import environment_kept

# CPU ranks may share cores: whoever asks for four ranks on two cores gets them.
LOCAL_CPU_SLOTS = 1024
CLOSE_SECONDS = 10.0
NOT_LET_IN = (
    "it has token authentication, and does not take the token of this process (RAY_AUTH_TOKEN, the file of "
    "RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token). Set RAY_AUTH_TOKEN_PATH to a file with what `ray get-auth-token` "
    "prints where the cluster was started, and do not set RAY_AUTH_MODE to anything but token"
)
ENDED = "the workers of this batch have ended: load() a batch before close()"
VITAL = ("gcs_server", "raylet")
# A cluster started here has no spare workers (80 MB each), and children of a killed rank end with its process group.
SMALL = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_process_group_cleanup_enabled": "1",
}


class RayCluster:
    """A hold on the cluster that this process is connected to: Ray allows one at a time. `close` lets go; the last one
    ends what was started here.

    address: of a running cluster ("auto" finds one on this machine; by default the variable RAY_ADDRESS). None starts
    one on this machine, without dashboard, that listens on the loopback interface only, unless the process is
    connected already: then that connection is used, and left as it is. object_store_memory_bytes: of a cluster that is
    started here; None leaves it to Ray. Raises ConfigError if the process is connected elsewhere, or the cluster
    cannot be reached.
    """

    _current: ClassVar[_Connection | None] = None

    def __init__(self, address: str | None = None, *, object_store_memory_bytes: int | None = None) -> None:
        connection = RayCluster._current
        if connection is None or connection.is_closed:
            connection = RayCluster._current = _Connection.open(address, object_store_memory_bytes)
        elif address not in (None, connection.address):
            raise ConfigError(
                f"ray address {address!r}: this process is connected to {connection.address!r} already, and Ray allows "
                f"one cluster at a time; close the other Trainer first"
            )
        connection.num_users += 1
        self._connection = connection
        self._end = session.at_end(self, connection.let_go)
        self.is_local = connection.is_loopback

    def hold(self) -> RayCluster:
        """Return another hold on the same cluster."""
        return RayCluster()

    def nodes(self, *, lost: bool = False) -> list[Node]:
        """List the machines that are up. lost: those too that were once."""
        return [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
            for node in ray.nodes()
            if node["Alive"] or lost
        ]

    def has_lost(self, node: str) -> bool:
        """Whether the node with this id is not up any more."""
        with contextlib.suppress(RayError):  # as without the process that knows of all nodes
            return all(other.id != node for other in self.nodes())
        return False

    def put(self, value: Any) -> Any:
        """Leave an object in the object store; it is freed when the last copy of the handle is gone."""
        return ray.put(self._if_open(value))

    def get(self, handle: Any) -> Any:
        """Return the object of a handle. Raises HybridRLError if the hold is closed."""
        return ray.get(self._if_open(handle))

    def is_open(self) -> bool:
        """Whether Ray may be called; if it is not connected, it would start or join another cluster by itself."""
        return self._end.alive and not self._connection.is_closed and ray.is_initialized()

    def _if_open(self, value: Any) -> Any:
        if not self.is_open():
            raise HybridRLError(ENDED)
        return value

    def lost(self) -> str:
        """Name the processes of a cluster started here that are gone; empty if all run."""
        return self._connection.lost()

    def abandon(self) -> None:
        """Disconnect at once: a minute after the loss of a process Ray would abort this one."""
        self._connection.close()

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self._end()


def joins(address: str | None) -> bool:
    """Whether RayCluster(address) joins a running cluster, rather than start one here."""
    return bool(address or os.environ.get("RAY_ADDRESS") or ray.is_initialized())


@dataclass
class _Connection:
    """The connection of this process to Ray. address: as it was asked for, None for a cluster started here. vital: the
    processes of a cluster started here without which nothing works, and their names."""

    address: str | None
    is_loopback: bool = False
    is_ours: bool = True
    is_closed: bool = False
    num_users: int = 0
    vital: dict[psutil.Process, str] = field(default_factory=dict)
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def open(cls, address: str | None, object_store_memory_bytes: int | None) -> _Connection:
        if ray.is_initialized():
            connected = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", connected):
                raise ConfigError(
                    f"ray address {address!r}: ray.init has connected this process to {connected!r} already; leave the "
                    f"address out to use that cluster, or call ray.shutdown() before"
                )
            return cls(address, is_ours=False)
        connection = cls(address or os.environ.get("RAY_ADDRESS") or None)
        cluster_address = connection.address
        try:
            connection.resources.enter_context(session.sigterm_exits())
            if cluster_address is None:
                connection._start(object_store_memory_bytes)
            else:
                cluster_address = ray_names.found_cluster(cluster_address)
                is_checked = session.check_reachable(cluster_address)  # Ray itself would try for minutes
                with environment_kept(), ray_names.quiet():
                    if is_checked:
                        ray_names.log_in(cluster_address)
                    ray.init(address=cluster_address, log_to_driver=False, configure_logging=False)
        except BaseException as error:
            connection.close()
            if not isinstance(error, Exception):  # a signal
                raise
            is_kept_out = isinstance(error, ray_names.AuthenticationError)
            reason = NOT_LET_IN if is_kept_out else f"{type(error).__name__}: {error}"
            if cluster_address is None:
                raise NoRoomError(
                    f"Ray could not be started on this machine: {reason}. A busy machine may take too long for it; "
                    "try again when there is less to do"
                ) from error
            where = f" (found at {cluster_address})" if cluster_address != connection.address else ""
            raise ConfigError(f"ray address {connection.address!r}{where} cannot be used: {reason}") from error
        return connection

    def _start(self, object_store_memory_bytes: int | None) -> None:
        folder = self.resources.enter_context(session.temporary_folder("hrl-ray-"))

        def start() -> None:
            with environment_kept(SMALL | ray_names.own_token()), ray_names.quiet():
                ray_names.start_cluster(
                    LOOPBACK,
                    str(folder / "r"),  # Ray lets every user read it; the folder above lets no other user in
                    num_cpus=LOCAL_CPU_SLOTS,
                    num_gpus=torch.cuda.device_count(),  # as PyTorch counts, and so num_ranks=auto
                    include_dashboard=False,
                    object_store_memory=object_store_memory_bytes,
                    log_to_driver=False,
                    configure_logging=False,
                )

        before = set(psutil.Process().children())
        # The kernel ends Ray's processes together with the thread that started them.
        try:
            self.resources.enter_context(session.alive_thread(start))
        finally:  # also if a signal breaks it off: `close` ends what is there by then
            started = {process: process.name() for process in psutil.Process().children() if process not in before}
            self.vital = {process: name for process, name in started.items() if name in VITAL}
        self.is_loopback = ray.util.get_node_ip_address() == LOOPBACK
        if not self.is_loopback:
            raise RuntimeError(
                f"Ray {ray.__version__} listens on {ray.util.get_node_ip_address()} rather than on {LOOPBACK} only; "
                f"use ray=={ray_names.TRIED}, or start a cluster yourself and give its address"
            )

    def lost(self) -> str:
        """List the vital processes that are gone, by name and pid."""
        if self.is_closed or not ray.is_initialized():
            return ""
        return ", ".join(
            f"{name} (pid {process.pid})" for process, name in self.vital.items() if not is_running(process)
        )

    def let_go(self) -> None:
        """Release one user's hold; the last one ends the connection."""
        self.num_users -= 1
        if self.num_users == 0:
            self.close()

    def close(self) -> None:
        """Disconnect, and end what was started here; a second call does nothing."""
        started = [] if self.is_closed else family([process.pid for process in self.vital])
        if self.is_ours and not self.is_closed and ray.is_initialized():
            ray.shutdown()
        self.is_closed = True
        # Without a gcs_server Ray's own agents would stay for two minutes.
        end_family(started, CLOSE_SECONDS)
        self.resources.close()


class RayActors:
    """The `Ranks` of a group as Ray actors. cluster: where they run; they keep a hold on it until they are closed."""

    def __init__(self, cluster: RayCluster) -> None:
        self.is_dead = False
        self._cluster = cluster.hold()
        self._places: list[Place] = []
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None
        self._pending: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}

    def open(self, role: str, num_ranks: int, options: RayOptions) -> tuple[str, int]:
        self._place(role, num_ranks, options)
        host, first, timeout = self._places[0].address, self._actors[0], options.collective_timeout
        return _get_all([first.open_store.remote(host, timeout)], options.start_seconds, "rank 0")[0]

    def _place(self, role: str, num_ranks: int, options: RayOptions) -> None:
        """Reserve room for all ranks at once, start their processes, and put them in order."""
        nodes, bundle = self._cluster.nodes(), placement.bundle_of(options)
        placement.check_room(num_ranks, bundle, nodes)
        self._group = placement_group([bundle] * num_ranks, strategy=options.placement.upper())
        if not self._group.wait(timeout_seconds=options.start_seconds):
            raise NoRoomError(
                f"the cluster had no room for {num_ranks} {role} ranks within {options.start_seconds:g} s because "
                f"other jobs use it; {ray.available_resources()} is free"
            )
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        # Listed again: nodes may have come and gone in the wait.
        counts, by_id = Counter(node_of.values()), {node.id: node for node in self._cluster.nodes(lost=True)}
        actor = cast(Any, ray.remote)(concurrency_groups={"control": 1}, max_restarts=0)(RankServer)
        started = []
        for index in range(num_ranks):
            node = by_id[node_of[index]]
            cores = own_cores() if self._cluster.is_local else int(node.resources.get("CPU", 1))
            env = placement.rank_environment(options, cores, counts[node.id])
            started.append(
                actor.options(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    runtime_env={"env_vars": env},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                ).remote(ray.put, ray.get, self.is_handle, ray.get_gpu_ids, node.address)
            )
        self._actors = started
        identities = _get_all(
            [actor.identity.remote() for actor in started], options.start_seconds, f"{role} processes"
        )
        here = ray.get_runtime_context().get_node_id()
        places = [
            replace(Place(i, node_of[i], by_id[node_of[i]].address, *identity), is_here=node_of[i] == here)
            for i, identity in enumerate(identities)
        ]
        placement.check_addresses(places)
        self._places = placement.rank_order(places)
        self._actors = [started[place.bundle] for place in self._places]

    def put(self, value: Any) -> Any:
        return self._cluster.put(value)

    def get(self, handle: Any) -> Any:
        if self.is_dead:
            raise HybridRLError(ENDED)
        return self._cluster.get(handle)

    @staticmethod
    def is_handle(value: Any) -> bool:
        return isinstance(value, ray.ObjectRef)

    @session.sigterm_waits()
    def send(self, method: str, messages: Sequence[tuple[Any, ...]]) -> None:
        self._asked, self._pending = {}, {}
        if self._cluster.lost():
            return
        self._pending = {
            rank: getattr(actor, method).remote(*message)
            for rank, (actor, message) in enumerate(zip(self._actors, messages, strict=True))
        }

    @session.sigterm_waits()
    def wait(self, ranks: Collection[int], timeout: float) -> Mapping[int, Outcome]:
        if lost := self._cluster.lost():
            return dict.fromkeys(ranks, Outcome(failure=cluster_ended(lost)))
        ready, _ = ray.wait([self._pending[rank] for rank in ranks], num_returns=len(ranks), timeout=timeout)
        done = [rank for rank in ranks if self._pending[rank] in set(ready)]
        return {rank: self._outcome(rank, self._pending.pop(rank)) for rank in done}

    def _outcome(self, rank: int, reference: Any) -> Outcome:
        place = self._places[rank]
        try:
            outcome: Outcome = ray.get(reference)
        except (RayActorError, OutOfMemoryError) as error:
            if self._cluster.has_lost(place.node):
                return Outcome(failure=node_lost(place.pid, place.host, place.address))
            return Outcome(failure=process_ended(place.pid, place.host, str(error)))
        except Exception as error:  # noqa: BLE001 - an outcome that cannot be read is this rank's failure
            return Outcome(failure=failure_of(error))
        return outcome

    @session.sigterm_waits()
    def health(self, ranks: Collection[int]) -> Mapping[int, Health]:
        health_by_rank = {}
        for rank, reference in list(self._asked.items()):
            if ray.wait([reference], timeout=0)[0]:
                del self._asked[rank]
                with contextlib.suppress(Exception):
                    health_by_rank[rank] = ray.get(reference)
        self._asked |= {rank: self._control(rank, "health") for rank in ranks if rank not in self._asked}
        return health_by_rank

    @session.sigterm_waits()
    def interrupt(self, ranks: Collection[int], call_id: int) -> None:
        for rank in ranks:
            self._control(rank, "interrupt", call_id)

    def _control(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method while another one runs."""
        return getattr(self._actors[rank], method).options(concurrency_group="control").remote(*args)

    def describe(self, rank: int) -> str:
        return describe_process(self._places[rank])

    def close(self, call_id: int) -> None:
        if self._cluster.is_open():
            if not self.is_dead and self._places and not self._cluster.lost():
                self.send("close", [(call_id,)] * len(self._actors))
                ray.wait(list(self._pending.values()), num_returns=len(self._pending), timeout=CLOSE_SECONDS)
            self.kill()
        self._cluster.close()

    def kill(self) -> None:
        """End all ranks at once. Those on this machine are gone when it returns, also stopped ones."""
        self.is_dead = True
        actors, self._actors = self._actors, []
        group, self._group = self._group, None
        if self._cluster.lost():
            # Ray must not be called any more.
            end_processes(self._places, CLOSE_SECONDS)
            self._cluster.abandon()
            return
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        end_processes(self._places, CLOSE_SECONDS)
        if group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(group)


def _get_all(references: Sequence[Any], seconds: float, what: str) -> list[Any]:
    """Return the values of all references. Raises WorkerError if they have not all come after so many seconds."""
    try:
        return ray.get(list(references), timeout=seconds)
    except RayActorError as error:
        raise WorkerError(f"{what} ended while they started: {error}") from error
    except GetTimeoutError as error:
        raise WorkerError(
            f"{what} did not start within {seconds:g} s: {error}; on slow machines raise "
            f"controller.ray.start_timeout_seconds"
        ) from error
