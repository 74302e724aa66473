"""Ranks in separate processes: the part of a backend that does not depend on how they are run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hybrid_rl.controller.dispatch import Worker, dispatch_of
from hybrid_rl.controller.exchange import Arguments, Splitter, answering, collect, cut
from hybrid_rl.controller.failures import Site, note_of_ranks, summary_of
from hybrid_rl.controller.mesh import RankMesh
from hybrid_rl.controller.placement import RayOptions
from hybrid_rl.controller.ranks import RankContext
from hybrid_rl.controller.server import Call, Seat
from hybrid_rl.controller.session import at_end
from hybrid_rl.controller.supervise import Transport, supervise
from hybrid_rl.controller.travel import Driver, pack, unpack
from hybrid_rl.errors import WorkerError
from hybrid_rl.process import progress

SHARED_ARGUMENT_BYTES = 100_000


class Ranks(Transport, Protocol):
    """The processes of a group, by rank: each runs a `RankServer`. is_dead: they were killed."""

    is_dead: bool

    def open(self, role: str, num_ranks: int, options: RayOptions) -> tuple[str, int]:
        """Start them, open the store where they meet; return its address. Raises ConfigError if there is no room."""

    def send(self, method: str, messages: Sequence[tuple[Any, ...]]) -> None:
        """Start a method of the servers; messages: its arguments on each rank."""

    def put(self, value: Any) -> Any:
        """Leave an object in the object store; it is freed when the last copy of the handle is gone."""

    def get(self, handle: Any) -> Any:
        """Return the object of a handle."""

    def is_handle(self, value: Any) -> bool:
        """Whether this is a handle that `put` returned."""

    def close(self, call_id: int) -> None:
        """Let the workers close, for a bounded time, then end their processes."""


class RemoteBackend:
    """Runs the calls of a group on all ranks.

    make_worker: makes the worker of a rank from its RankContext; sent to the ranks by cloudpickle. splitter: cuts a
    batch for the shards of a "groups" call. log_folder: gets one log per rank, `<role>-rank<r>.log`. Raises ConfigError
    if there is no room or make_worker cannot be sent, and whatever a rank raised while it made its worker.
    """

    def __init__(
        self,
        role: str,
        make_worker: Callable[[RankContext], Worker],
        *,
        mesh: RankMesh,
        splitter: Splitter,
        ranks: Ranks,
        options: RayOptions,
        log_folder: Path,
    ) -> None:
        self.role, self.label, self.num_ranks = role, "", mesh.num_ranks
        self._mesh, self._splitter, self._options, self._ranks = mesh, splitter, options, ranks
        self._reason = ""  # why the ranks were killed
        self._ids = itertools.count(1)
        logs = {rank: log_folder.resolve() / f"{role}-rank{rank}.log" for rank in range(mesh.num_ranks)}
        self._site = Site(role, mesh.num_ranks, logs)
        self._end = at_end(self, _close, ranks, self._ids)
        try:
            data, handles = pack(make_worker, ranks.is_handle, "make_worker")
            with progress.doing("starting processes"):
                store = ranks.open(role, mesh.num_ranks, options)
            call_id, driver, timeout = next(self._ids), Driver.here(), options.collective_timeout
            seats = [Seat(role, rank, mesh, store, logs[rank], timeout, driver) for rank in range(self.num_ranks)]
            shared = self._share(data)
            send = partial(ranks.send, "start", [(call_id, seat, shared, handles) for seat in seats])
            # Imports and weights take time: the limit for starting applies if it is the longer one.
            patient = replace(options, watchdog_seconds=max(options.watchdog_seconds, options.start_seconds))
            supervise(ranks, self._site, call_id, "the start of its worker", patient, send)
        except BaseException as error:
            self.close()
            note_of_ranks(error)
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the processes of the ranks have ended."""
        return self._ranks.is_dead or not self._end.alive

    def call(self, method: Callable[..., object], *args: Any) -> Any:
        """Run a dispatched method on all ranks as its declaration says. Batches of its answer stay on the ranks.

        Raises the error of the rank that failed first: ours with a note, every other one as WorkerError.
        """
        name, record = method.__name__, dispatch_of(method)
        if not self._end.alive:
            raise RuntimeError(f"the {self.role} workers are closed; make a new Trainer")
        if self._ranks.is_dead:
            ended = WorkerError(
                f"the {self.role} workers have ended after: {self._reason}; make a new Trainer (resume= continues "
                f"from a checkpoint)"
            )
            raise note_of_ranks(ended)
        parts = cut(name, record, args, self._mesh.num_data_ranks, self._splitter)
        call_id, known = next(self._ids), frozenset(getattr(parts.batch, "columns", ()))
        packed, answering_ranks = self._pack(name, parts.arguments), set(answering(record, self._mesh))
        messages = [
            (Call(call_id, name, known, rank in answering_ranks), *packed[self._mesh.data_rank(rank)])
            for rank in range(self.num_ranks)
        ]
        send = partial(self._ranks.send, "call", messages)
        doing = f"{name}(){self.label and f' at {self.label}'}"
        try:
            with progress.doing(name.replace("_", " ")):
                values = supervise(self._ranks, self._site, call_id, doing, self._options, send)
        except BaseException as error:
            self._reason = summary_of(error)
            note_of_ranks(error)
            raise
        answers = {rank: unpack(*values[rank]) for rank in answering_ranks}
        return collect(name, record, parts, self._mesh, answers, self._ranks.get)

    def close(self) -> None:
        """Close the workers and end their processes; a second call does nothing."""
        self._end()

    def _pack(self, name: str, parts: Sequence[Arguments]) -> list[tuple[Any, list[Any]]]:
        """Pack the arguments of each part as bytes and handles; arguments that all parts share are packed once."""
        packed: dict[int, tuple[Any, list[Any]]] = {}
        for arguments in parts:
            if id(arguments) not in packed:
                data, handles = pack(arguments, self._ranks.is_handle, f"the arguments of {name}()")
                is_shared = len(parts) < self.num_ranks or all(other is arguments for other in parts)
                packed[id(arguments)] = (self._share(data) if is_shared else data, handles)
        return [packed[id(arguments)] for arguments in parts]

    def _share(self, data: bytes) -> Any:
        """Return bytes for several ranks: large ones go into the object store, once per node instead of per rank."""
        return self._ranks.put(data) if self.num_ranks > 1 and len(data) > SHARED_ARGUMENT_BYTES else data


def _close(ranks: Ranks, ids: Iterator[int]) -> None:
    ranks.close(next(ids))
