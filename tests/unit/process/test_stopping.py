"""Requests to stop: signals and a deadline, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from hybrid_rl.process.interrupts import deferred_interrupt
from hybrid_rl.process.stopping import (
    SIGNALS,
    RunStopped,
    Stop,
    is_own_process,
    note_checkpoint,
    own_process,
    seconds_of,
    seconds_since_start,
)

ROOT = Path(__file__).parents[3]
ENDED, BY_SIGTERM = 75, 143


def run(program: str, *, ignores_ctrl_c: bool = False) -> subprocess.CompletedProcess[str]:
    """A program with the names of this file; in the background of a shell's script, for example, Ctrl-C is ignored."""
    start = "import os, signal, time\nfrom hybrid_rl.process.interrupts import deferred_interrupt\n"
    start += "from hybrid_rl.process.stopping import Stop\n"
    if ignores_ctrl_c:
        start = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + start
    return subprocess.run([sys.executable, "-c", start + program], cwd=ROOT, text=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90.0), ("13800", 13800.0), ("03:50:00", 13800.0), ("0:00:01", 1.0), ("1-12:00:05", 129605.0)],
)
def test_durations(given, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "3h", "03:50", "1:2:99", "slurm"])
def test_what_is_no_duration(given: str) -> None:
    with pytest.raises(ValueError):
        seconds_of(given)


def test_the_age_of_this_process() -> None:
    assert abs(seconds_since_start() - (time.time() - psutil.Process().create_time())) < 5


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_block_with_its_name(number: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in (*SIGNALS, signal.SIGINT)}
    stop, done = Stop(handles_signals=True), []
    stop.has_checkpoint = True
    with pytest.raises(RunStopped) as raised, stop.watching():
        with deferred_interrupt():
            signal.raise_signal(number)
            signal.raise_signal(number)  # at once: the same request
            done.append("deferred")
        done.append("too much")
    assert done == ["deferred"] and stop.reason == number.name
    assert raised.value.reason == number.name and raised.value.code == ENDED
    assert {one: signal.getsignal(one) for one in before} == before


def test_nothing_is_handled_unasked() -> None:
    before = {one: signal.getsignal(one) for one in (*SIGNALS, signal.SIGINT)}
    with Stop().watching():
        assert {one: signal.getsignal(one) for one in before} == before
    with pytest.raises(KeyboardInterrupt), Stop(handles_signals=True).watching():
        signal.raise_signal(signal.SIGINT)  # a Ctrl-C remains one


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Stop(handles_signals=True).watching():
            signal.raise_signal(signal.SIGUSR1)
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_deadline_ends_a_wait() -> None:
    with pytest.raises(RunStopped) as raised, Stop(seconds=0.05).watching():
        time.sleep(60)
    assert raised.value.reason == "save_before"
    with Stop(seconds=60).watching():
        pass
    assert not any(
        isinstance(thread, threading.Timer) and not thread.finished.is_set() for thread in threading.enumerate()
    )


def test_a_deadline_that_is_over_ends_a_thread_where_it_checks() -> None:
    raised: list[BaseException] = []

    def body() -> None:
        stop = Stop(seconds=0.0)
        try:
            with stop.watching():
                stop.check()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert isinstance(raised[0], RunStopped)


def test_a_script_ends_with_the_status_and_a_second_signal_at_once() -> None:
    once = "with Stop(handles_signals=True).watching():\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(30)\n"
    for ignores in (False, True):
        done = run(once, ignores_ctrl_c=ignores)
        assert (done.returncode, done.stderr) == (BY_SIGTERM, "")
    ctrl_c = "with Stop(handles_signals=True).watching():\n    os.kill(os.getpid(), signal.SIGINT)\nprint('ignored')"
    assert run(ctrl_c, ignores_ctrl_c=True).stdout == "ignored\n"
    twice = (
        "with Stop(handles_signals=True).watching(), deferred_interrupt():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(1.2)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(30)\n"
    )
    assert run(twice).returncode == -signal.SIGTERM


def test_what_a_stop_without_a_checkpoint_ends_with() -> None:
    """As a shell has it; on Linux SIGUSR1 is 10 and SIGUSR2 12."""
    codes = {name: RunStopped(name, has_checkpoint=False).code for name in ("SIGTERM", "SIGUSR1", "SIGUSR2")}
    assert codes == {"SIGTERM": 143, "SIGUSR1": 138, "SIGUSR2": 140}
    assert RunStopped("save_before", has_checkpoint=False).code == 1 and RunStopped("SIGUSR1").code == ENDED


def test_a_program_of_the_library_may_be_told_to_stop_at_any_time(capsys) -> None:
    """Before training, say. That of a run that has a checkpoint is to be tried again."""
    assert not is_own_process()
    for notes, status, told in (
        (False, 143, "there is no checkpoint"),
        (True, 75, "the same run started again"),
    ):
        with pytest.raises(RunStopped) as raised, own_process():
            assert is_own_process()
            if notes:
                note_checkpoint()
            signal.raise_signal(signal.SIGTERM)
        assert raised.value.code == status
        line = capsys.readouterr().err
        assert line.startswith(f"stopped by SIGTERM; {told}") and line.endswith("; nothing was saved at the signal\n")
    assert not is_own_process() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("listens", "how"), [(True, "ends the run as Ctrl-C would"), (False, "at once, unsaved")])
def test_a_process_that_ignores_ctrl_c_says_once_what_ends_it(listens: bool, how: str) -> None:
    program = f"for _ in range(2): print(os.getpid(), Stop(handles_signals={listens}).without_interrupt())"
    first, second = run(program, ignores_ctrl_c=True).stdout.splitlines()
    pid = first.split()[0]
    assert "started with Ctrl-C ignored" in first and f"kill {pid} (SIGTERM)" in first and how in first
    assert second == f"{pid} "
    assert [line.split()[1:] for line in run(program).stdout.splitlines()] == [[], []]
