"""Functions run on several ranks: one spawned process each, gloo over the loopback device between them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_SECONDS = 180.0
GRACE_SECONDS = 3.0


class RankError(RuntimeError):
    """A rank raised, died or took too long; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, deadline_seconds: float = DEADLINE_SECONDS
) -> list[Any]:
    """`function(rank, num_ranks, *args)` on every rank, with the default process group set up; results by rank.

    The function is one of a module (processes are spawned and import it); arguments and results are pickled. Raises
    RankError with the tracebacks of the ranks that fail, or where not all are done by the deadline. No process is
    left behind in any case.
    """
    spawn = multiprocessing.get_context("spawn")
    processes, connections = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                ours, theirs = spawn.Pipe(duplex=False)
                call = (str(Path(folder) / "store"), deadline_seconds, theirs, function, rank, num_ranks, args)
                process = spawn.Process(target=_rank_main, args=call, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            results = _collect(connections, time.monotonic() + deadline_seconds)
            for process in processes:
                process.join(timeout=10)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()
            for connection in connections:
                connection.close()


def _collect(connections: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(connections):
        pending = {c: rank for rank, c in enumerate(connections) if rank not in {*results, *failures}}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise RankError(f"ranks {sorted(pending.values())} were not done by the deadline")
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending[connection]
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                succeeded, value = False, "it died without a word"
            if succeeded:
                results[rank] = value
                continue
            failures[rank] = value
            # Others fail because this one did, or wait for it in vain: a moment for theirs, which may be the cause.
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        raise RankError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(connections))]


def _rank_main(
    store: str,
    deadline_seconds: float,
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
) -> None:
    # Plain pickle: torch's own would pass tensors as handles on memory that goes with this process.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=deadline_seconds),
        )
        message = pickle.dumps((True, function(rank, num_ranks, *args)))
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    connection.send_bytes(message)
    dist.barrier()  # a rank that leaves early would break the others' connections
    dist.destroy_process_group()
