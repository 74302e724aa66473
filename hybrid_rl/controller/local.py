"""The local backend: one rank, in this process. It runs the same code as every other backend, and a debugger can
follow it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hybrid_rl.controller.dispatch import Worker, dispatch_of
from hybrid_rl.controller.exchange import Parts, collect
from hybrid_rl.controller.failures import note_of_ranks
from hybrid_rl.controller.ranks import CPU, RankContext
from hybrid_rl.process import progress
from hybrid_rl.process.interrupts import deferred_interrupt


class LocalBackend:
    """Runs the calls of a group in the calling thread, on one worker. device: where it computes; a GPU is the current
    one inside calls only, since the process is the user's."""

    num_ranks = 1

    def __init__(self, role: str, make_worker: Callable[[RankContext], Worker], device: torch.device = CPU) -> None:
        self.role = role
        self.label = ""
        self._context = RankContext(role, device=device)
        with self._on_device():
            self._worker: Worker | None = make_worker(self._context)

    def _on_device(self) -> AbstractContextManager[object]:
        device = self._context.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @property
    def has_ended(self) -> bool:
        """Whether the worker is closed."""
        return self._worker is None

    def call(self, method: Callable[..., object], *args: Any) -> Any:
        """Run a dispatched method. One rank: nothing to split and nothing to move; a batch is itself.

        An exception of the worker passes through as it is, with a note that names role, rank, method and what the
        driver was doing.
        """
        name, record = method.__name__, dispatch_of(method)
        if self._worker is None:
            raise RuntimeError(f"the {self.role} workers are closed; make a new Trainer")
        try:
            # A Ctrl-C inside a call would leave engine, memory or optimizer half changed: it waits for the call's end.
            work = progress.doing(name.replace("_", " "))
            with work, deferred_interrupt(), self._on_device(), record.leased(self._worker):
                answer = getattr(self._worker, name)(*args)
        except Exception as error:
            error.add_note(f"in {self.role}.{name}() on rank 0 of 1{self.label and f', {self.label}'}")
            note_of_ranks(error)
            raise
        return collect(name, record, Parts([args]), self._context.mesh, {0: answer})

    def close(self) -> None:
        """Release the worker; a second call does nothing."""
        worker, self._worker = self._worker, None
        if worker is not None:
            with self._on_device():
                worker.close()
