"""Functions run on several ranks: one process each, gloo over the loopback device between them.

The processes are forks of a server that has imported what all of them need, and has done nothing else: importing takes
six seconds of a core, a fork some milliseconds. Nothing of the test's own process gets into them but its environment.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_SECONDS = 180.0
GRACE_SECONDS = 3.0
STACK_SECONDS = 5.0
# A collective that nobody joins ends with an error of its own, and its traceback, before the deadline.
TIMEOUT_SHARE = 0.8
PRELOADED = (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "hybrid_rl.workers.hybrid",
)
FROZEN = "tests.distributed.frozen"  # imported last


class RankError(RuntimeError):
    """A rank raised, died or took too long; the message holds its traceback."""


def forking(*modules: str) -> ForkServerContext:
    """Makes processes of the server, which has imported what all of them need by the first of them; modules: what the
    first of them need besides."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *modules, FROZEN])
    return context


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    deadline_seconds: float = DEADLINE_SECONDS,
    preloaded: tuple[str, ...] = (),
) -> list[Any]:
    """`function(rank, num_ranks, *args)` on every rank, with the default process group set up; results by rank.

    The function is one of a module, which the processes import; arguments and results are pickled. preloaded: modules
    that cost seconds to import, for the server, if this call is the one that starts it. Raises RankError
    with the tracebacks of the ranks that fail, or, if not all are done by the deadline, with the stacks of those
    that are not. No process is left behind in any case, but for the server.
    """
    context = forking(*preloaded)
    processes, connections = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                call = (folder, dict(os.environ), deadline_seconds, theirs, function, rank, num_ranks, args)
                process = context.Process(target=_rank_main, args=call, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            try:
                results = _collect(connections, time.monotonic() + deadline_seconds)
            except _Late as late:
                stacks = {rank: _stacks(processes[rank], folder / f"stacks-{rank}") for rank in late.ranks}
                told = "\n".join(f"rank {rank} was at:\n{text}" for rank, text in stacks.items())
                raise RankError(f"ranks {late.ranks} were not done by the deadline\n{told}") from None
            for process in processes:
                process.join(timeout=10)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()
            for connection in connections:
                connection.close()


class _Late(Exception):
    """The deadline has passed, and these ranks have said nothing."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def _stacks(process: BaseProcess, path: Path) -> str:
    """Where all threads of a rank are. They cannot be asked for before it has begun, or while it is stopped."""
    if not path.exists():
        return "  the imports before its function"
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    end = time.monotonic() + STACK_SECONDS
    # The last line of a dump is the outermost call of the thread that came first: written to its end.
    while time.monotonic() < end and "_rank_main" not in path.read_text():
        time.sleep(0.05)
    return path.read_text() or "  an unknown place: it does not answer"


def _collect(connections: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(connections):
        pending = {c: rank for rank, c in enumerate(connections) if rank not in {*results, *failures}}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise _Late(sorted(pending.values()))
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
    folder: Path,
    environment: dict[str, str],
    deadline_seconds: float,
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
) -> None:
    # Plain pickle: torch's own would pass tensors as handles on memory that goes with this process.
    os.environ.clear()
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    # Written by the interpreter's own handler, whatever the thread is in; the file stays open as long as the process.
    stacks = open(folder / f"stacks-{rank}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=TIMEOUT_SHARE * deadline_seconds),
        )
        message = pickle.dumps((True, function(rank, num_ranks, *args)))
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    connection.send_bytes(message)
    dist.barrier()  # a rank that leaves early would break the others' connections
    dist.destroy_process_group()
