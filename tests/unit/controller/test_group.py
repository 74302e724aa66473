"""Worker groups: calls in the background, their order, their errors, and Ctrl-C while one is waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest

from hybrid_rl.controller import LocalBackend, RankContext, WorkerGroup, dispatch, result_of
from hybrid_rl.process.interrupts import interrupt_requested

PATIENCE = 20.0  # seconds until a test that hangs gives up


class Worker:
    """Notes its calls; `wait` ends when it is let go, or when an interrupt is asked for."""

    def __init__(self, context: RankContext | None = None) -> None:
        self.calls: list[Any] = []
        self.go = threading.Event()

    def lease(self, tags: frozenset[str]) -> Any:
        return nullcontext()

    def close(self) -> None:
        self.calls.append("closed")

    @dispatch()
    def note(self, value: Any) -> Any:
        self.calls.append(value)
        if isinstance(value, BaseException):
            raise value
        return value

    @dispatch()
    def wait(self, value: int) -> int:
        end = time.monotonic() + PATIENCE
        while not self.go.wait(0.01) and time.monotonic() < end:
            if interrupt_requested():
                raise KeyboardInterrupt
        self.calls.append(value)
        return value


class Group(WorkerGroup):
    def note(self, value: Any) -> Any:
        return self._ranks.call(Worker.note, value)

    def wait(self, value: int) -> int:
        return self._ranks.call(Worker.wait, value)


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def group(worker: Worker) -> Group:
    return Group(LocalBackend("policy", lambda _: worker))


def test_a_submitted_call_runs_while_the_driver_goes_on(group: Group, worker: Worker) -> None:
    future = group.submit(Group.wait, 7)
    assert not future.done() and worker.calls == []
    worker.go.set()
    assert result_of(future) == 7


def test_calls_run_in_the_order_in_which_they_were_made(group: Group, worker: Worker) -> None:
    futures = [group.submit(Group.wait, 1), group.submit(Group.note, 2)]
    threading.Timer(0.05, worker.go.set).start()
    assert group.note(3) == 3  # waits for both
    assert worker.calls == [1, 2, 3]
    assert [result_of(future) for future in futures] == [1, 2]


def test_calls_of_two_groups_run_side_by_side(group: Group, worker: Worker) -> None:
    other = Worker()
    second = Group(LocalBackend("reference", lambda _: other))
    future = group.submit(Group.wait, 1)
    assert second.note("meanwhile") == "meanwhile" and not future.done()
    worker.go.set()
    assert result_of(future) == 1


def test_an_error_comes_out_of_its_future_only(group: Group) -> None:
    future = group.submit(Group.note, ValueError("of this call"))
    assert group.note("next") == "next"
    with pytest.raises(ValueError, match="of this call") as caught:
        result_of(future)
    assert caught.value.__notes__ == ["in policy.note() on rank 0 of 1"]


def test_ctrl_c_ends_the_call_that_is_waited_for(group: Group, worker: Worker) -> None:
    future = group.submit(Group.wait, 1)
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        result_of(future)
    assert worker.calls == [] and not interrupt_requested()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert group.note("goes on") == "goes on"


def test_close_waits_for_what_was_submitted(group: Group, worker: Worker) -> None:
    group.submit(Group.wait, 1)
    threading.Timer(0.05, worker.go.set).start()
    group.close()
    group.close()
    assert worker.calls == [1, "closed"]
    with pytest.raises(RuntimeError, match="the policy workers are closed; make a new Trainer"):
        group.note(2)
