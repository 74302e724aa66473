from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch.distributed as dist

from hybrid_rl.controller.failures import (
    Failure,
    Site,
    error_of,
    failure_of,
    log_tail,
    process_ended,
    root_cause,
    summary_of,
)
from hybrid_rl.errors import CheckpointError, HandoffError, PeerFailedError, WorkerError


class OfPeer(HandoffError, PeerFailedError):
    """As layers above mix it in."""


ECHO = Failure("RuntimeError", "gloo: connection closed by peer", is_echo=True, is_disconnected=True)
ENDED = process_ended(12, "here", "Worker exit detail: End of file. Some common causes include: (1)")
OWN = Failure("ValueError", "bad batch", "Traceback ...\nValueError: bad batch")
INTERRUPTED = Failure("KeyboardInterrupt", "", is_interrupt=True)


def raised(error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as caught:
        return failure_of(caught)


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        ({1: OWN}, 1),
        ({0: ECHO, 1: OWN}, 1),
        ({0: ECHO, 2: INTERRUPTED, 1: ENDED}, 1),
        ({0: ENDED, 1: OWN}, 1),
        ({3: OWN, 1: OWN}, 3),
        ({2: ECHO, 1: ECHO}, 2),
    ],
)
def test_the_cause_is_the_first_that_is_no_echo(order: dict[int, Failure], cause: int) -> None:
    """An exception wins over a process that ended: others may end because of it."""
    assert root_cause(order) == cause


def test_broken_collectives_are_echoes() -> None:
    assert raised(RuntimeError("[.../gloo/transport/tcp/pair.cc:537] Connection closed by peer")).is_echo
    assert raised(dist.DistBackendError("NCCL error")).is_echo
    assert not raised(RuntimeError("mat1 and mat2 shapes cannot be multiplied")).is_echo
    assert not raised(ValueError("gloo")).is_echo
    assert raised(KeyboardInterrupt()).is_interrupt


def test_what_peers_say_of_a_failure_is_an_echo() -> None:
    """The rank that died, or raised first, is the cause, whoever tells of it before."""
    told = raised(OfPeer("participant 1 failed: ValueError: bad batch"))
    assert told.is_echo and not told.is_disconnected, "all came back: they can go on"
    try:
        raise OfPeer("a participant is gone") from RuntimeError("gloo: connection closed by peer")
    except OfPeer as error:
        broken = failure_of(error)
    assert broken.is_echo and broken.is_disconnected
    for failure in (told, broken):
        assert root_cause({0: failure, 2: failure, 1: ENDED}) == 1
        assert root_cause({0: failure, 1: raised(ValueError("bad batch"))}) == 1
        assert root_cause({0: failure, 1: raised(HandoffError("a byte differs"))}) == 1
    error = error_of(Site("policy", 2, {}), "update()", {0: broken, 1: ENDED})
    assert type(error) is WorkerError and str(error).startswith("policy rank 1 of 2 failed in update(): process ended")
    assert not raised(HandoffError("a byte differs")).is_echo


def test_one_error_tells_everything(tmp_path: Path) -> None:
    site = Site("policy", 4, {rank: tmp_path / f"{rank}.log" for rank in range(4)})
    error = error_of(site, "update() at training step 3", {2: ECHO, 1: OWN, 0: INTERRUPTED})
    assert type(error) is WorkerError
    assert str(error).splitlines() == [
        "policy rank 1 of 4 failed in update() at training step 3: ValueError: bad batch",
        "after that also: rank 2 (RuntimeError: gloo: connection closed by peer), rank 0 (KeyboardInterrupt)",
        f"log of the rank: {tmp_path / '1.log'}",
        "remote traceback:",
        "Traceback ...",
        "ValueError: bad batch",
    ]


def test_our_own_errors_stay_themselves() -> None:
    error = error_of(Site("policy", 2, {}), "save()", {0: raised(CheckpointError("disk full"))})
    assert type(error) is CheckpointError and str(error) == "disk full"
    assert error.__notes__[0].startswith("policy rank 0 of 2 failed in save(): CheckpointError: disk full\n")


def test_the_original_is_the_cause_where_it_travels() -> None:
    class Hidden(Exception):
        """Local: it cannot be pickled."""

    site = Site("policy", 2, {})
    assert type(error_of(site, "f()", {0: raised(KeyError("k"))}).__cause__) is KeyError
    hidden = raised(Hidden("secret"))
    assert hidden.error is None and "Hidden: secret" in str(error_of(site, "f()", {0: hidden}))
    broken = Failure("Gone", "m", error=pickle.dumps(ValueError())[:-2])
    assert error_of(site, "f()", {0: broken}).__cause__ is None


def test_an_ended_process_says_what_is_known() -> None:
    assert ENDED.is_end and ENDED.message == (
        "pid 12 on here is gone: it was killed (by hand, or by the kernel when memory ran out), crashed, or called "
        "exit. End of file."
    )
    told = "Task was killed due to the node running low on memory. Worker exit detail: x"
    assert told in process_ended(1, "h", told).message


def test_only_a_process_that_is_gone_without_a_word_was_killed() -> None:
    site = Site("policy", 2, {})
    hung = Failure("hang", "no rank made progress", "rank 0: its stack", is_end=True)
    for failures, is_kill in (({0: ENDED}, True), ({0: hung}, False), ({0: raised(KeyError()), 1: ENDED}, False)):
        error = error_of(site, "f()", failures)
        assert isinstance(error, WorkerError) and error.is_kill == is_kill


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    assert log_tail(log) == ""
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    assert log_tail(log).splitlines() == [f"line {i}" for i in range(85, 100)]
    log.write_text("before\nFatal Python error: Segmentation fault\n" + "".join(f"frame {i}\n" for i in range(60)))
    assert log_tail(log).splitlines()[:2] == ["Fatal Python error: Segmentation fault", "frame 0"]
    assert len(log_tail(log).splitlines()) == 15


def test_what_followed_is_not_cut_within_a_word() -> None:
    long = Failure("ValueError", "word " * 60)
    line = str(error_of(Site("policy", 2, {}), "f()", {0: OWN, 1: long})).splitlines()[1]
    assert line.endswith("word ...)") and len(line) < 200


def test_a_failure_in_one_line() -> None:
    site = Site("policy", 2, {})
    assert summary_of(error_of(site, "f()", {0: OWN})) == "policy rank 0 of 2 failed in f(): ValueError: bad batch"
    ours = error_of(site, "save()", {1: raised(CheckpointError("disk full"))})
    assert summary_of(ours) == "policy rank 1 of 2 failed in save(): CheckpointError: disk full"
    assert summary_of(KeyboardInterrupt()) == "KeyboardInterrupt"
