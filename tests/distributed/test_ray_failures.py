from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.errors import CheckpointError, WorkerError
from tests.distributed.conftest import DEADLINE_SECONDS, is_running, start_group, wait_until
from tests.distributed.forks import Forks
from tests.support.groups import OpenGroup

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Nothing here hangs; times are not otherwise looked at."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < DEADLINE_SECONDS


@pytest.fixture
def pids() -> list[int]:
    """Of ranks that must be gone when the test ends."""
    return []


@pytest.fixture
def group(forked_ranks: Any, make_group: Callable[..., OpenGroup], pids: list[int]) -> Iterator[OpenGroup]:
    group = make_group(2, grace_seconds=2.0)
    group.label = "training step 7"
    pids += [about["pid"] for about in group.about()]
    yield group
    group.close()
    assert not any(is_running(pid) for pid in pids)


def assert_unusable(group: OpenGroup) -> None:
    with pytest.raises(WorkerError, match=r"have ended after: (policy rank \d of 2 failed in|KeyboardInter).*make a"):
        group.gather(0)


@pytest.fixture(scope="module")
def lasting(cluster: Any, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenGroup]:
    """For failures after which a group works on."""
    with forks.used():
        group = start_group(cluster, tmp_path_factory.mktemp("logs"), grace_seconds=60.0)
    group.label = "training step 7"
    yield group
    group.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("value error", "ValueError: bad batch"),
        ("odd error", "LocalTrouble: this and that"),
        ("system exit", "SystemExit: 4"),
        ("memory", "MemoryError: "),
        ("allocation", "RuntimeError: .*can't allocate memory"),
    ],
)
def test_an_exception_ends_the_call_everywhere(lasting: OpenGroup, fault: str, message: str) -> None:
    """The other rank would work for an hour: it is asked to end. Nobody is lost, so the group works on."""
    with pytest.raises(WorkerError) as caught:
        lasting.work(3600.0, 1, fault)
    text = str(caught.value)
    assert text.startswith("policy rank 1 of 2 failed in work() at training step 7: ")
    assert re.search(message, text.splitlines()[0])
    assert "in work\n    FAULTS[then](self)" in text, "the remote traceback"
    assert "policy-rank1.log" in text and "after that also: rank 0 (KeyboardInterrupt)" in text
    assert lasting.gather("on") == [[(0, "on"), (1, "on")]] * 2


def test_our_errors_keep_their_type(lasting: OpenGroup) -> None:
    with pytest.raises(CheckpointError, match="disk full") as caught:
        lasting.work(3600.0, 0, "our error")
    assert str(caught.value) == "disk full"
    note = caught.value.__notes__[0]
    assert note.startswith("policy rank 0 of 2 failed in work() at training step 7: CheckpointError: disk full\n")
    assert "Traceback (most recent call last)" in note


def test_an_exception_before_a_collective_does_not_hang_the_others(group: OpenGroup) -> None:
    with pytest.raises(WorkerError, match=r"policy rank 1 of 2 failed in collective\(\).*ValueError: bad batch"):
        group.collective(1, "value error")
    assert_unusable(group)


@pytest.mark.parametrize("fault", ["crash", pytest.param("exit", marks=pytest.mark.sweep)])
def test_a_rank_that_dies(group: OpenGroup, pids: list[int], fault: str) -> None:
    with pytest.raises(WorkerError) as caught:
        group.collective(1, fault)
    text = str(caught.value)
    assert f"policy rank 1 of 2 failed in collective() at training step 7: process ended: pid {pids[1]} on" in text
    assert "end of its log:\n" in text
    if fault == "crash":
        assert "Segmentation fault" in text and 'workers.py", line' in text, "where it crashed"
    if fault == "exit":
        assert "the last words" in text
    assert_unusable(group)
    assert not any(is_running(pid) for pid in pids), "also those that did not fail"


def test_a_rank_that_died_between_calls(group: OpenGroup, pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not is_running(pids[0]), "not killed")
    with pytest.raises(WorkerError, match=r"policy rank 0 of 2 failed in gather\(\).*process ended"):
        group.gather(1)
    assert_unusable(group)


@pytest.mark.parametrize(
    ("fault", "told"),
    [("hang", "time.sleep(3600)"), pytest.param("stop", "on this machine is stopped", marks=pytest.mark.sweep)],
)
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_hangs(make_group: Callable[..., OpenGroup], pids: list[int], fault: str, told: str) -> None:
    group = make_group(2, watchdog_seconds=3.0, grace_seconds=60.0)
    pids += [about["pid"] for about in group.about()]
    with pytest.raises(WorkerError) as caught:
        group.collective(1, fault)
    text = str(caught.value)
    assert "policy rank 1 of 2 failed in collective(): hang: no rank made progress for 3 s" in text
    assert told in text.partition("rank 1, without progress for")[2], "what the rank does"
    assert "dist.all_reduce(value)" in text.partition("rank 0, without progress for")[2], "what the others do"
    assert not any(is_running(pid) for pid in pids)
    assert_unusable(group)


@pytest.mark.usefixtures("forked_ranks")
def test_long_work_that_gets_on_is_no_hang(make_group: Callable[..., OpenGroup]) -> None:
    """Rank 0 waits for rank 1 in a collective for longer than the watchdog's patience."""
    group = make_group(2, watchdog_seconds=1.0)
    assert group.waiting_for(1, 4.0) == [3.0, 3.0]


@pytest.mark.usefixtures("forked_ranks")
def test_a_worker_that_cannot_be_made(make_group: Callable[..., OpenGroup]) -> None:
    with pytest.raises(WorkerError, match=r"policy rank [01] of 2 failed in the start of its worker: .*not for me"):
        make_group(2, make_worker=_refuse)


def _refuse(context: Any) -> Any:
    raise RuntimeError("not for me")


def test_children_of_a_killed_rank_end_too(make_group: Callable[..., OpenGroup]) -> None:
    """Ray's raylet ends them, those of the process that it has started itself."""
    group = make_group(2)
    children = group.start_child()
    with pytest.raises(WorkerError):
        group.collective(1, "kill")
    wait_until(lambda: not any(is_running(pid) for pid in children), "children outlive their rank")


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def _press(*seconds: float) -> None:
    for after in seconds:
        threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_ends_what_may_be_broken_off_and_only_that_call(lasting: OpenGroup) -> None:
    _press(0.5)
    with pytest.raises(KeyboardInterrupt):
        lasting.patient(3600.0, True)
    assert lasting.patient(0.5, True) == [0, 1]


def test_ctrl_c_waits_for_what_must_be_finished(lasting: OpenGroup, tmp_path: Path) -> None:
    _press(0.5)
    with pytest.raises(KeyboardInterrupt):
        lasting.finish(2.0, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], "both had come to their end"
    assert lasting.gather(1) == [[(0, 1), (1, 1)]] * 2


def test_a_second_ctrl_c_kills(group: OpenGroup, pids: list[int]) -> None:
    _press(1.0, 2.0)
    with pytest.raises(KeyboardInterrupt):
        group.patient(3600.0, False)
    assert not any(is_running(pid) for pid in pids)
    assert_unusable(group)
