"""The server of a rank: holds the worker, runs calls on it, and reports its health meanwhile."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_rl.batch import Batch, BatchRef, store
from hybrid_rl.controller.dispatch import dispatch_of
from hybrid_rl.controller.failures import Failure, failure_of
from hybrid_rl.controller.mesh import RankMesh
from hybrid_rl.controller.placement import LOOPBACK
from hybrid_rl.controller.rank_log import RankLog
from hybrid_rl.controller.ranks import (
    VISIBLE,
    RankContext,
    enter_device,
    gpu_place,
    interface_of,
    join_ranks,
    leave_ranks,
    object_gather,
    open_store,
    take_device,
    use_interface,
)
from hybrid_rl.controller.travel import Driver, pack, unpack
from hybrid_rl.process import progress
from hybrid_rl.process.heartbeat import mark_progress, seconds_since_progress
from hybrid_rl.process.interrupts import clear_interrupt, request_interrupt

logger = logging.getLogger("hybrid_rl")

COLLECTIVES = str(Path(dist.__file__).parent) + os.sep


@dataclass(frozen=True)
class Seat:
    """The place of one rank. store: address of the meeting point; log_path: of its log; driver: where its modules are
    found."""

    role: str
    rank: int
    mesh: RankMesh
    store: tuple[str, int]
    log_path: Path
    collective_timeout: timedelta
    driver: Driver


@dataclass(frozen=True)
class Call:
    """One call for one rank. known: columns that the driver has of the batch that was cut; wants_answer: False if the
    answer would be thrown away."""

    id: int
    method: str
    known: frozenset[str] = frozenset()
    wants_answer: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a call ended on a rank. value: its answer as packed bytes and handles; warnings: (level, message) of the
    library since the last outcome."""

    value: Any = None
    failure: Failure | None = None
    warnings: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class Health:
    """How a rank is. idle_seconds: since it last made progress; stack: of the thread that works; progress: of what it
    does; is_in_collective: whether the thread is inside torch.distributed."""

    idle_seconds: float
    stack: str = ""
    warnings: Sequence[tuple[int, str]] = ()
    progress: progress.Progress = progress.Progress()
    is_in_collective: bool = False


@dataclass
class RankServer:
    """Runs in the process of a rank. `start`, `call` and `close` come one at a time; `health` and `interrupt` at any
    time, from another thread. put, get, is_handle: of the object store. gpu_ids: the GPUs that this process was given.
    address: of its node in the cluster, at which ranks meet."""

    put: Callable[[Any], Any]
    get: Callable[[Any], Any]
    is_handle: Callable[[Any], bool]
    gpu_ids: Callable[[], Sequence[str | int]] = tuple
    address: str = LOOPBACK
    _worker: Any = None
    _log: RankLog | None = None
    _store: dist.TCPStore | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _call_id: int | None = None
    _interrupted_id: int | None = None
    _thread: int = 0

    def identity(self) -> tuple[str, int, int | None, str | None, str]:
        """(host name, process id, place of its GPU among the visible ones, CUDA_VISIBLE_DEVICES, network interface with
        the node's address) of this process."""
        place = gpu_place([*map(str, self.gpu_ids())], os.environ)
        return socket.gethostname(), os.getpid(), place, os.environ.get(VISIBLE), interface_of(self.address)

    def open_store(self, host: str, timeout: timedelta) -> tuple[str, int]:
        """Open the meeting point of all ranks, and return its address."""
        self._store, port = open_store(host, timeout)
        return host, port

    def start(self, call_id: int, seat: Seat, data: bytes, handles: Sequence[Any]) -> Outcome:
        """Meet the other ranks and make the worker. data, handles: the packed function that makes it."""

        def start() -> None:
            device = take_device([*map(str, self.gpu_ids())])
            self._log = RankLog(seat.log_path)
            if seat.mesh.num_ranks > 1:
                meeting = self._store or dist.TCPStore(
                    *seat.store, is_master=False, wait_for_workers=False, timeout=seat.collective_timeout
                )
                use_interface(self.address)
                join_ranks(meeting, seat.rank, seat.mesh.num_ranks, device, seat.collective_timeout)
            gather = object_gather(seat.mesh.num_ranks, seat.collective_timeout)
            logger.info(
                "%s rank %d of %d: pid %d on %s, %s, %d threads",
                *(seat.role, seat.rank, seat.mesh.num_ranks, os.getpid(), socket.gethostname(), device),
                torch.get_num_threads(),
            )
            seat.driver.adopt()
            context = RankContext(seat.role, seat.rank, seat.mesh, device, gather, self.get)
            with progress.doing("importing libraries"):
                make_worker = unpack(data, handles)
            self._worker = make_worker(context)

        return self._run(call_id, start)

    def call(self, call: Call, data: bytes, handles: Sequence[Any]) -> Outcome:
        """Run a method of the worker. data, handles: its packed arguments."""

        def run() -> Any:
            record = dispatch_of(getattr(self._worker, call.method))

            def resolve(value: Any) -> Any:
                return value.resolve(self.get, objects=record.objects) if isinstance(value, BatchRef) else value

            with record.leased(self._worker):
                answer = getattr(self._worker, call.method)(*map(resolve, unpack(data, handles)))
            if not call.wants_answer:
                return None
            return pack(self._keep(answer, call.known), self.is_handle, f"the answer of {call.method}()")

        return self._run(call.id, run)

    def close(self, call_id: int) -> Outcome:
        """Close the worker and leave the other ranks."""

        def close() -> None:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.close()
            leave_ranks()

        return self._run(call_id, close)

    def health(self) -> Health:
        """Report how this rank is."""
        warnings = self._log.drain() if self._log is not None else ()
        frame = sys._current_frames().get(self._thread)
        frames = traceback.extract_stack(frame) if frame is not None and self._call_id is not None else []
        is_in_collective = any(frame.filename.startswith(COLLECTIVES) for frame in frames)
        stack = "".join(traceback.format_list(frames))
        return Health(seconds_since_progress(), stack, warnings, progress.here(), is_in_collective)

    def interrupt(self, call_id: int) -> None:
        """Ask a call to end at its next safe point; do nothing if it has ended."""
        with self._guard:
            self._interrupted_id = call_id
            if self._call_id == call_id:
                request_interrupt()

    def _run(self, call_id: int, work: Callable[[], Any]) -> Outcome:
        mark_progress()
        with self._guard:
            self._call_id, self._thread = call_id, threading.get_ident()
            if self._interrupted_id == call_id:
                request_interrupt()
        value, failure = None, None
        try:
            enter_device()  # calls may come in a thread that the start did not
            with progress.doing(""):  # what is counted before anything is named belongs to this call
                value = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the driver decides
            failure = failure_of(error)
            if not failure.is_interrupt:
                traceback.print_exception(error)
        finally:
            with self._guard:
                self._call_id = None
                clear_interrupt()
        return Outcome(value, failure, self._log.drain() if self._log is not None else ())

    def _keep(self, answer: Any, known: frozenset[str]) -> Any:
        """Keep the batches of an answer here; the driver gets references."""
        if isinstance(answer, Batch):
            return store(answer, self.put, known)
        if isinstance(answer, tuple) and answer and isinstance(answer[0], Batch):
            return (store(answer[0], self.put, known), *answer[1:])
        return answer
