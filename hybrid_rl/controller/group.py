"""Worker groups: many ranks as one typed object, whose calls can be waited for or run in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from hybrid_rl.errors import do_all
from hybrid_rl.process.interrupts import deferred_interrupt

P = ParamSpec("P")
R = TypeVar("R")


class Backend(Protocol):
    """The ranks of a group. label: the current work of the driver, for errors ("training step 3")."""

    role: str
    num_ranks: int
    label: str

    @property
    def has_ended(self) -> bool:
        """Whether no ranks are left to call."""

    def call(self, method: Callable[..., object], *args: Any) -> Any:
        """Run a dispatched method of the worker class on all ranks, as its declaration says."""

    def close(self) -> None:
        """End all ranks; idempotent."""


class WorkerGroup:
    """The ranks of a role. A subclass has a typed method for each dispatched method of its worker class, which calls it
    on every rank: `def update(self, batch, step): return self._ranks.call(Worker.update, batch, step)`.

    beside: groups that work for this one: all have its label, none is left if one is gone, and they end with it."""

    def __init__(self, backend: Backend, beside: Sequence[WorkerGroup] = ()) -> None:
        self._backend, self._beside = backend, beside
        self._lane: ThreadPoolExecutor | None = None
        self._lane_thread = 0
        self._submitted: Future[Any] | None = None

    def submit(self, method: Callable[Concatenate[Self, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start a call in the background: `group.submit(PolicyGroup.update, batch, step)`. `result_of` waits for it.

        The calls of a group run one after the other in the order in which they were made; calls of different groups run
        side by side. An exception of the call comes out of the future.
        """
        if self._lane is None:
            name = f"{self._backend.role}-calls"
            self._lane = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=self._note_lane)
        future = self._lane.submit(method, self, *args, **kwargs)
        self._submitted = future
        return future

    def _note_lane(self) -> None:
        self._lane_thread = get_ident()

    @property
    def _ranks(self) -> Backend:
        """The backend, once the calls that were submitted before have ended."""
        if self._submitted is not None and get_ident() != self._lane_thread:
            with deferred_interrupt():
                wait([self._submitted])  # its error is raised by the future
            self._submitted = None
        return self._backend

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return self._backend.num_ranks

    @property
    def has_ended(self) -> bool:
        """Whether the ranks are gone, by a failure or `close`."""
        return self._backend.has_ended or any(group.has_ended for group in self._beside)

    @property
    def label(self) -> str:
        """The current work of the driver; errors of the ranks name it."""
        return self._backend.label

    @label.setter
    def label(self, label: str) -> None:
        self._backend.label = label
        for group in self._beside:
            group.label = label

    def close(self) -> None:
        """End all ranks, once the calls that were submitted have ended; idempotent."""
        do_all(*(group.close for group in self._beside), self._end)

    def _end(self) -> None:
        try:
            self._ranks.close()
        finally:
            lane, self._lane = self._lane, None
            if lane is not None:
                lane.shutdown(wait=False)  # it is idle, or a second Ctrl-C has given up on it


def result_of(future: Future[R]) -> R:
    """Wait for a call that was submitted, and return its result. Ctrl-C asks the ranks to end at their next safe point,
    as it does in a call that is waited for."""
    with deferred_interrupt():
        return future.result()
