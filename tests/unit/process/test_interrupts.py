"""Ctrl-C, really sent, arrives after the block and not in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hybrid_rl.process.interrupts import clear_interrupt, deferred_interrupt, interrupt_requested, request_interrupt

LIMIT = 20.0  # seconds a signal may take; it takes microseconds

# Sends itself Ctrl-C while it updates, under whatever handler it was started with.
PROGRAM = """
import os, signal
from hybrid_rl.process.interrupts import deferred_interrupt
with deferred_interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    print("updated", flush=True)
print("after", flush=True)
"""


@pytest.fixture(autouse=True)
def handler() -> Iterator[Any]:
    """Python's own handler, whatever the test runner has set; and back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    clear_interrupt()


def interrupt() -> None:
    """Ctrl-C, and enough bytecodes for the interpreter to notice."""
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        time.sleep(0)


def test_it_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupt():
            interrupt()
            done.append("update")
        done.append("never")
    assert done == ["update"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_passes_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        interrupt()
        done.append("first")
        interrupt()
        done.append("second")
    assert done == ["first"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not interrupt_requested()  # no request is left behind


def test_a_block_that_must_not_end_half_way_holds_all() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt(every=True):
        for turn in range(3):
            interrupt()
            done.append(turn)
    assert done == [0, 1, 2] and not interrupt_requested()


def test_an_outer_block_that_has_one_already_lets_the_second_pass_after_such_a_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        interrupt()
        with deferred_interrupt(every=True):
            interrupt()
            done.append("moved")
        done.append("never")
    assert done == ["moved"]


@pytest.mark.parametrize("sent", [True, False])
def test_an_error_of_the_block_is_what_comes_out(sent: bool) -> None:
    with pytest.raises(ValueError), deferred_interrupt():
        if sent:
            interrupt()
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_outer_block_holds_it_as_well_and_still_sees_what_the_inner_one_held() -> None:
    """A call inside a step: the step is asked to end as well."""
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        with deferred_interrupt():
            interrupt()
            assert interrupt_requested()
        done.append(interrupt_requested())
    assert done == [True] and not interrupt_requested()


def test_the_handler_that_was_there_gets_it() -> None:
    """A notebook or a launcher may have its own; it runs once, after the block."""
    log: list[str] = []
    signal.signal(signal.SIGINT, lambda *_: log.append("handled"))
    with deferred_interrupt():
        interrupt()
        log.append("update")
    assert log == ["update", "handled"]


def test_elsewhere_than_in_the_main_thread_the_block_runs_and_sees_requests() -> None:
    """There the block has no handler of its own; the flag is the process's, and stays."""
    log: list[Any] = []

    def work() -> None:
        with deferred_interrupt():
            log.append(signal.getsignal(signal.SIGINT))
            request_interrupt()
            log.append(interrupt_requested())
        log.append(interrupt_requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT)
    assert log == [signal.default_int_handler, True, True]


@pytest.mark.parametrize(
    ("disposition", "output", "status"),
    [(signal.SIG_DFL, "updated\n", None), (signal.SIG_IGN, "updated\nafter\n", 0)],
    ids=["shell", "background"],
)
def test_in_a_process_of_its_own(disposition: signal.Handlers, output: str, status: int | None) -> None:
    """Started from a shell it ends as Ctrl-C ends programs; started with Ctrl-C ignored (in the background of a
    script) it goes on."""
    signal.signal(signal.SIGINT, disposition)  # inherited by the child
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=LIMIT * 3)
    assert result.stdout == output
    if status is None:
        assert result.returncode != 0 and "KeyboardInterrupt" in result.stderr
    else:
        assert result.returncode == status


# ------------------------------------------------------------------------------------------------------- what work asks


def test_work_can_see_that_one_is_held_back() -> None:
    seen = [interrupt_requested()]
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        seen.append(interrupt_requested())
        interrupt()
        seen.append(interrupt_requested())
    assert seen == [False, False, True]
    assert not interrupt_requested()  # delivered: the next block starts afresh
    with deferred_interrupt():
        assert not interrupt_requested()  # none sent, none raised
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_work_that_breaks_off_by_itself_is_one_interrupt() -> None:
    """It raises at its own safe point; what was held back is not delivered a second time."""
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        interrupt()
        while not interrupt_requested():
            done.append("never")
        raise KeyboardInterrupt
    assert done == [] and not interrupt_requested()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_process_asks_and_the_request_stays_until_it_is_forgotten() -> None:
    """A worker gets no signal: its controller sets the flag from a thread."""
    thread = threading.Thread(target=request_interrupt)
    thread.start()
    thread.join(LIMIT)
    assert interrupt_requested()
    with deferred_interrupt():  # no signal came, so nothing is raised, and nothing is forgotten
        assert interrupt_requested()
    assert interrupt_requested()
    clear_interrupt()
    assert not interrupt_requested()
