from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_rl.batch import Batch, BatchRef, Jagged
from hybrid_rl.controller import RankContext, dispatch
from hybrid_rl.errors import CheckpointError
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.process.interrupts import interrupt_requested
from tests.support.libraries.python_names import end_at_once
from tests.support.libraries.ray_names import num_known_objects

logger = logging.getLogger("hybrid_rl.worker")

# Set by a test in its own process: a forked rank would see it.
MARK = "none"


def split_whole_groups(batch: Batch | BatchRef, num_parts: int) -> list[torch.Tensor]:
    """Whole groups, dealt out in turn: uneven, and out of order."""
    rows = batch.group_rows()
    parts = [[place for group in rows[part::num_parts] for place in group] for part in range(num_parts)]
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


def sample_batch(num_groups: int, size: int, length: int = 3) -> Batch:
    """Groups of `size` samples in a row; sample i has the prompt [i, i] and a completion of `length` times i."""
    n = num_groups * size
    return Batch(
        {
            "prompt_ids": Jagged.from_rows([[i, i] for i in range(n)], torch.int64),
            "completion_ids": Jagged.from_rows([[i] * length for i in range(n)], torch.int64),
            "group": torch.arange(n) // size,
            "trajectory": torch.arange(n),
            "row": [{"place": i} for i in range(n)],
        }
    )


class Probe:
    """A worker without reinforcement learning: answers what it sees, and fails in every way asked for."""

    def __init__(self, context: RankContext) -> None:
        self.context = context

    @contextmanager
    def lease(self, tags: frozenset[str]) -> Iterator[None]:
        yield

    def close(self) -> None:
        logger.info("closed")

    # ------------------------------------------------------------------------------------------- what a rank sees

    @dispatch(collect="all")
    def about(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "GLOO_SOCKET_IFNAME", "CHOSEN")
        return {
            "rank": self.context.rank,
            "role": self.context.role,
            "num_ranks": self.context.num_ranks,
            "device": str(self.context.device),
            "pid": os.getpid(),
            "mark": MARK,
            "env": {name: os.environ.get(name) for name in names},
            "threads": torch.get_num_threads(),
        }

    @dispatch(collect="all")
    def gather(self, value: Any) -> list[Any]:
        return self.context.gather((self.context.rank, value))

    @dispatch(collect="all")
    def all_reduce(self) -> float:
        value = torch.tensor([float(self.context.rank + 1)])
        dist.all_reduce(value)
        return value.item()

    @dispatch(collect="all")
    def shown(self, value: Any) -> Any:
        return value

    # ---------------------------------------------------------------------------------------------------- batches

    @dispatch(split="items", collect="concat")
    def rollout(self, tasks: list[int], length: int) -> tuple[Batch, int]:
        return sample_batch(1, 1, length).select([0] * len(tasks)).without("trajectory", "group").with_columns(
            group=torch.tensor(tasks, dtype=torch.int64), trajectory=torch.tensor(tasks, dtype=torch.int64)
        ), self.context.rank

    @dispatch(split="groups", collect="concat")
    def score(self, batch: Batch, factor: float) -> Batch:
        ids = batch["completion_ids"]
        mark = torch.full((batch.num_samples,), float(self.context.rank), dtype=torch.float64)
        return batch.with_columns(rewards=mark, old_logprobs=ids.with_values(ids.values.float() * factor))

    @dispatch(split="groups", collect="all", objects=True)
    def seen(self, batch: Batch) -> tuple[list[int], list[str], list[Any]]:
        return batch["trajectory"].tolist(), sorted(batch), batch["row"]

    @dispatch(split="groups", collect="all")
    def seen_without_objects(self, batch: Batch) -> tuple[list[int], list[str]]:
        return batch["trajectory"].tolist(), sorted(batch)

    @dispatch(collect="all")
    def references(self) -> int:
        """Objects of the object store that this process knows of: its own blocks, as long as somebody needs them."""
        return num_known_objects()

    # --------------------------------------------------------------------------------------------------- failures

    @dispatch(collect="all")
    def work(self, seconds: float, rank: int, then: str) -> int:
        """`rank` does what `then` names; the others work for `seconds`, or until they are asked to end."""
        if rank in (self.context.rank, -1):
            FAULTS[then](self)
        self.wait(seconds)
        return self.context.rank

    @dispatch(collect="all")
    def collective(self, rank: int, then: str) -> float:
        """All ranks meet in an all-reduce, but `rank` does what `then` names before."""
        if rank == self.context.rank:
            FAULTS[then](self)
        return self.all_reduce()

    @dispatch(collect="all")
    def patient(self, seconds: float, can_break_off: bool) -> int:
        """Make progress for `seconds`; end early, by KeyboardInterrupt, if possible."""
        self.wait(seconds, can_break_off)
        return self.context.rank

    @dispatch(collect="all")
    def finish(self, seconds: float, folder: Path) -> None:
        """Works for `seconds` and leaves a mark; cannot be broken off."""
        self.wait(seconds, False)
        (folder / str(self.context.rank)).touch()

    @dispatch(collect="all")
    def waiting_for(self, rank: int, seconds: float) -> float:
        """An all-reduce, to which `rank` comes late."""
        if rank == self.context.rank:
            self.wait(seconds, False)
        return self.all_reduce()

    @dispatch(collect="all")
    def warn(self, message: str) -> None:
        print("printed", message)
        logger.info("informed %s", message)
        logger.warning("warned %s", message)

    @dispatch(collect="all")
    def start_child(self) -> int:
        """A process as a reward pool has them: it ends when its standard input does."""
        self.child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        return self.child.pid

    def wait(self, seconds: float, can_break_off: bool = True) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            mark_progress()
            if can_break_off and interrupt_requested():
                raise KeyboardInterrupt
            time.sleep(0.02)


def _raise(error: Callable[[], BaseException]) -> Callable[[Probe], None]:
    def fail(worker: Probe) -> None:
        raise error()

    return fail


class LocalTrouble(Exception):
    """Cannot be unpickled: its constructor needs more than its message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def _signal(number: int) -> Callable[[Probe], None]:
    return lambda worker: os.kill(os.getpid(), number)


def _stop(worker: Probe) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    _hang(worker)  # other threads of a process may be stopped before the one that asked for it


def _warn_and_exit(worker: Probe) -> None:
    warnings.warn("the last words", stacklevel=1)
    end_at_once(3)


def _hang(worker: Probe) -> None:
    time.sleep(3600)


def _crash(worker: Probe) -> None:
    ctypes.string_at(0)


def _exhaust(worker: Probe) -> None:
    torch.empty(1 << 50)


FAULTS: dict[str, Callable[[Probe], None]] = {
    "value error": _raise(lambda: ValueError("bad batch")),
    "our error": _raise(lambda: CheckpointError("disk full")),
    "odd error": _raise(lambda: LocalTrouble("this", "that")),
    "system exit": _raise(lambda: SystemExit(4)),
    "kill": _signal(signal.SIGKILL),
    "stop": _stop,
    "crash": _crash,
    "exit": _warn_and_exit,
    "hang": _hang,
    "allocation": _exhaust,
    "memory": _raise(MemoryError),
}
