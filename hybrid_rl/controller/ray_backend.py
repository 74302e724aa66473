"""Ranks as Ray actors, in a cluster that is started here or was there before. The only file that imports ray."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import ray
import ray._private.node
import ray._private.services
import ray._private.worker
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybrid_rl.controller import placement, session
from hybrid_rl.controller.exchange import Splitter
from hybrid_rl.controller.failures import failure_of, process_ended
from hybrid_rl.controller.local import Worker
from hybrid_rl.controller.mesh import RankMesh
from hybrid_rl.controller.placement import LOOPBACK, Node, Place, RayOptions
from hybrid_rl.controller.processes import describe_process, end_processes, own_cores
from hybrid_rl.controller.ranks import RankContext
from hybrid_rl.controller.remote import RemoteBackend
from hybrid_rl.controller.server import Call, Health, Outcome, RankServer, Seat, identity
from hybrid_rl.errors import ConfigError, WorkerError

# CPU ranks may share cores: whoever asks for four ranks on two cores gets them.
LOCAL_CPU_SLOTS = 1024
SHARED_ARGUMENT_BYTES = 100_000
CLOSE_SECONDS = 10.0


class RayCluster:
    """A hold on the cluster that this process is connected to: Ray allows one at a time. `close` lets go; the last one
    ends what was started here.

    address: of a running cluster ("auto" finds one on this machine; the variable RAY_ADDRESS stands in). None starts
    one on this machine, without dashboard, that listens on the loopback interface only, unless the process is
    connected already: then that connection is used, and left as it is. object_store_memory_bytes: of a cluster that is
    started here; None leaves it to Ray. Raises ConfigError where the process is connected elsewhere, or the cluster
    cannot be reached.
    """

    _connection: ClassVar[_Connection | None] = None
    _num_users: ClassVar[int] = 0

    def __init__(self, address: str | None = None, *, object_store_memory_bytes: int | None = None) -> None:
        connection = RayCluster._connection
        if connection is None:
            connection = RayCluster._connection = _Connection.open(address, object_store_memory_bytes)
        elif address not in (None, connection.address):
            raise ConfigError(
                f"ray address {address!r}: this process is connected to {connection.address!r} already, and Ray allows "
                f"one cluster at a time; close the other Trainer first"
            )
        RayCluster._num_users += 1
        self._end = session.at_end(self, RayCluster._let_go)
        self.is_local = connection.is_loopback

    def hold(self) -> RayCluster:
        """Another hold on the same cluster."""
        return RayCluster()

    def nodes(self) -> list[Node]:
        """The machines that are up."""
        return [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
        ]

    def put(self, value: Any) -> Any:
        """Leave an object in the object store; it is freed when the last copy of the handle is gone."""
        return ray.put(value)

    def get(self, handle: Any) -> Any:
        """The object behind a handle."""
        return ray.get(handle)

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self._end()

    @staticmethod
    def _let_go() -> None:
        RayCluster._num_users -= 1
        if RayCluster._num_users == 0:
            connection, RayCluster._connection = RayCluster._connection, None
            if connection is not None:
                connection.close()


@dataclass
class _Connection:
    """The connection of this process to Ray. address: as it was asked for, None for a cluster started here."""

    address: str | None
    is_loopback: bool = False
    is_ours: bool = True
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def open(cls, address: str | None, object_store_memory_bytes: int | None) -> _Connection:
        if ray.is_initialized():
            return cls._of_the_user(address)
        connection = cls(address or os.environ.get("RAY_ADDRESS") or None)
        try:
            if connection.address is None:
                connection._start(object_store_memory_bytes)
            else:
                # Ray itself would try for minutes.
                session.check_reachable(connection.address)
                with _quiet_ray():
                    ray.init(address=connection.address, log_to_driver=False, configure_logging=False)
        except Exception as error:
            connection.close()
            what = f"ray address {connection.address!r}" if connection.address else "a Ray cluster on this machine"
            raise ConfigError(f"{what} cannot be used: {error}") from error
        return connection

    @classmethod
    def _of_the_user(cls, address: str | None) -> _Connection:
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", connected):
            raise ConfigError(
                f"ray address {address!r}: ray.init has connected this process to {connected!r} already; leave the "
                f"address out to use that cluster, or call ray.shutdown() before"
            )
        return cls(address, is_ours=False)

    def _start(self, object_store_memory_bytes: int | None) -> None:
        folder = self.resources.enter_context(session.temporary_folder("hrl-ray-"))

        def start() -> None:
            with _quiet_ray(), _small_and_loopback_only():
                ray.init(
                    address="local",
                    num_cpus=LOCAL_CPU_SLOTS,
                    include_dashboard=False,
                    object_store_memory=object_store_memory_bytes,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address=LOOPBACK,
                    _temp_dir=str(folder),
                )

        # The kernel ends Ray's processes together with the thread that started them.
        self.resources.enter_context(session.alive_thread(start))
        self.is_loopback = ray.util.get_node_ip_address() == LOOPBACK
        if not self.is_loopback:
            raise RuntimeError(
                f"Ray {ray.__version__} listens on {ray.util.get_node_ip_address()} rather than on {LOOPBACK} only; "
                f"use ray==2.60.0, or start a cluster yourself and give its address"
            )

    def close(self) -> None:
        """Disconnect, and end what was started here."""
        if self.is_ours and ray.is_initialized():
            ray.shutdown()
        self.resources.close()


@contextlib.contextmanager
def _quiet_ray() -> Iterator[None]:
    """Connect without messages on the console, now and later: how a rank ended is told by our own errors."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with session.replaced((ray._private.worker, "listen_error_messages", session.nothing)):
            yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _small_and_loopback_only() -> Iterator[None]:
    """Make ray.init take the loopback address that it is given, which it otherwise replaces by the machine's own, and
    leave out what nobody here needs, 80 MB each: dashboard, autoscaler, logs on the console, spare workers."""
    node = ray._private.node.Node
    # Children of a rank that was killed end with its process group.
    with (
        session.environment(
            RAY_enable_worker_prestart="0", RAY_prestart_worker_first_driver="0", RAY_process_group_cleanup_enabled="1"
        ),
        session.replaced(
            (ray._private.services, "resolve_ip_for_localhost", lambda host: host),
            (node, "start_monitor", session.nothing),
            (node, "start_log_monitor", session.nothing),
            (node, "start_api_server", session.nothing),
        ),
    ):
        yield


class _RankActor:
    """The process of a rank. Calls run one at a time; the control methods answer meanwhile."""

    def __init__(self) -> None:
        self._server = RankServer(ray.put, ray.get, _is_handle)

    def identity(self) -> tuple[str, int, str]:
        return identity()

    def open_store(self, host: str, timeout: timedelta) -> tuple[str, int]:
        return self._server.open_store(host, timeout)

    def start(self, call_id: int, seat: Seat, data: bytes, handles: Sequence[Any]) -> Outcome:
        return self._server.start(call_id, seat, data, handles)

    def call(self, call: Call, data: bytes, handles: Sequence[Any]) -> Outcome:
        return self._server.call(call, data, handles)

    def close(self, call_id: int) -> Outcome:
        return self._server.close(call_id)

    @ray.method(concurrency_group="control")
    def health(self) -> Health:
        return self._server.health()

    @ray.method(concurrency_group="control")
    def interrupt(self, call_id: int) -> None:
        self._server.interrupt(call_id)


class RayBackend(RemoteBackend):
    """Runs the calls of a group on one Ray actor per rank; see RemoteBackend. cluster: where to run; the backend keeps
    its own hold on it."""

    def __init__(
        self,
        role: str,
        make_worker: Callable[[RankContext], Worker],
        *,
        mesh: RankMesh,
        splitter: Splitter,
        cluster: RayCluster,
        options: RayOptions,
        log_folder: Path,
    ) -> None:
        ranks = _Ranks(cluster.hold(), role, mesh.num_ranks, options)
        super().__init__(
            role, make_worker, mesh=mesh, splitter=splitter, ranks=ranks, options=options, log_folder=log_folder
        )


class _Ranks:
    """The actors of a group, by rank, and how they are reached and ended."""

    def __init__(self, cluster: RayCluster, role: str, num_ranks: int, options: RayOptions) -> None:
        self.is_dead = False
        self._cluster, self._role, self._num_ranks, self._options = cluster, role, num_ranks, options
        self._places: list[Place] = []
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None
        self._pending: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}

    def open(self, timeout: timedelta) -> tuple[str, int]:
        """See Ranks."""
        self._place(self._role, self._num_ranks, self._options)
        host, first = self._places[0].address, self._actors[0]
        return _get_all([first.open_store.remote(host, timeout)], self._options.start_seconds, "rank 0")[0]

    def _place(self, role: str, num_ranks: int, options: RayOptions) -> None:
        """Reserve room for all ranks at once, start their processes, and put them in order."""
        nodes = self._cluster.nodes()
        gpus = options.gpus_per_rank
        if gpus is None:
            gpus = int(any(node.resources.get("GPU", 0) for node in nodes))
        bundle = {"CPU": options.cpus_per_rank} | ({"GPU": float(gpus)} if gpus else {})
        placement.check_room(num_ranks, bundle, nodes)
        self._group = placement_group([bundle] * num_ranks, strategy=options.placement.upper())
        if not self._group.wait(timeout_seconds=options.start_seconds):
            raise ConfigError(
                f"the cluster did not give room for {num_ranks} {role} ranks within {options.start_seconds:g} s: it is "
                f"used by others; free {ray.available_resources()} is left"
            )
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        counts, by_id = placement.ranks_per_node(list(node_of.values())), {node.id: node for node in nodes}
        remote: Any = ray.remote
        actor = remote(concurrency_groups={"control": 1}, max_restarts=0)(_RankActor)
        started = []
        for index in range(num_ranks):
            node = by_id[node_of[index]]
            cores = own_cores() if self._cluster.is_local else int(node.resources.get("CPU", 1))
            env = placement.rank_environment(options, cores, counts[node.id], loopback=self._cluster.is_local)
            started.append(
                actor.options(
                    num_cpus=options.cpus_per_rank,
                    num_gpus=gpus,
                    runtime_env={"env_vars": env},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                ).remote()
            )
        self._actors = started
        found = _get_all([actor.identity.remote() for actor in started], options.start_seconds, f"{role} processes")
        places = [
            Place(index, node_of[index], by_id[node_of[index]].address, host, pid, devices)
            for index, (host, pid, devices) in enumerate(found)
        ]
        self._places = placement.rank_order(places)
        self._actors = [started[place.bundle] for place in self._places]

    def put(self, value: Any) -> Any:
        """See Ranks."""
        return ray.put(value)

    def get(self, handle: Any) -> Any:
        """See Ranks."""
        return ray.get(handle)

    def is_handle(self, value: Any) -> bool:
        """See Ranks."""
        return _is_handle(value)

    def send(self, method: str, messages: Sequence[tuple[Any, ...]]) -> None:
        """See Ranks."""
        self._asked = {}
        self._pending = {
            rank: getattr(actor, method).remote(*message)
            for rank, (actor, message) in enumerate(zip(self._actors, messages, strict=True))
        }

    def wait(self, ranks: Collection[int], timeout: float) -> Mapping[int, Outcome]:
        """See Transport."""
        ready, _ = ray.wait([self._pending[rank] for rank in ranks], num_returns=len(ranks), timeout=timeout)
        done = [rank for rank in ranks if self._pending[rank] in set(ready)]
        return {rank: self._outcome(rank, self._pending.pop(rank)) for rank in done}

    def _outcome(self, rank: int, reference: Any) -> Outcome:
        place = self._places[rank]
        try:
            outcome: Outcome = ray.get(reference)
        except (RayActorError, OutOfMemoryError) as error:
            return Outcome(failure=process_ended(place.pid, place.host, str(error)))
        except Exception as error:  # noqa: BLE001 - an outcome that cannot be read is this rank's failure
            return Outcome(failure=failure_of(error))
        return outcome

    def health(self, ranks: Collection[int]) -> Mapping[int, Health]:
        """See Transport."""
        found = {}
        for rank, reference in list(self._asked.items()):
            if ray.wait([reference], timeout=0)[0]:
                del self._asked[rank]
                with contextlib.suppress(Exception):
                    found[rank] = ray.get(reference)
        self._asked |= {rank: self._actors[rank].health.remote() for rank in ranks if rank not in self._asked}
        return found

    def interrupt(self, ranks: Collection[int], call_id: int) -> None:
        """See Transport."""
        for rank in ranks:
            self._actors[rank].interrupt.remote(call_id)

    def describe(self, rank: int) -> str:
        """See Transport."""
        return describe_process(self._places[rank])

    def close(self, call_id: int) -> None:
        """See Ranks."""
        if ray.is_initialized():
            if not self.is_dead and self._places:
                self.send("close", [(call_id,)] * len(self._actors))
                ray.wait(list(self._pending.values()), num_returns=len(self._pending), timeout=CLOSE_SECONDS)
            self.kill()
        self._cluster.close()

    def kill(self) -> None:
        """See Transport. Those on this machine are gone when it returns, also stopped ones."""
        self.is_dead = True
        actors, self._actors = self._actors, []
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        end_processes(self._places, CLOSE_SECONDS)
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(group)


def _is_handle(value: Any) -> bool:
    return isinstance(value, ray.ObjectRef)


def _get_all(references: Sequence[Any], seconds: float, what: str) -> list[Any]:
    """Raises WorkerError where not all have come after so many seconds."""
    try:
        return ray.get(list(references), timeout=seconds)
    except (GetTimeoutError, RayActorError) as error:
        raise WorkerError(f"{what} did not start within start_seconds={seconds:g}: {error}") from error
