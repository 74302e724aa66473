from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.controller import supervise as module
from hybrid_rl.controller.failures import Failure, Site
from hybrid_rl.controller.placement import RayOptions
from hybrid_rl.controller.server import Health, Outcome
from hybrid_rl.controller.supervise import supervise
from hybrid_rl.errors import WorkerError

OWN = Outcome(failure=Failure("ValueError", "bad batch"))
ECHO = Outcome(failure=Failure("RuntimeError", "gloo", is_echo=True, is_disconnected=True))
ENDED = Outcome(failure=Failure("process ended", "pid 7", is_end=True))
INTERRUPTED = Outcome(failure=Failure("KeyboardInterrupt", "", is_interrupt=True))
OPTIONS = RayOptions(grace_seconds=5.0, watchdog_seconds=60.0)


class Ranks:
    """Answers by a script over a clock of its own: one second passes with every look.

    script: rank -> (second, outcome); idle: rank -> seconds without progress that it tells, None for no answer.
    stubborn: ranks that go on after they were asked to end.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, script: Mapping[int, tuple[float, Outcome]], *, stubborn: bool = False
    ) -> None:
        self.now = 0.0
        self.script = dict(script)
        self.idle: dict[int, float | None] = {}
        self.in_collective: set[int] = set()
        self.stubborn = stubborn
        self.interrupted: list[tuple[float, list[int], int]] = []
        self.killed_at: float | None = None
        self.at: dict[float, Any] = {}
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def wait(self, ranks: Collection[int], timeout: float) -> Mapping[int, Outcome]:
        self.now += 1.0
        assert self.now < 1000, "never ends"
        if self.now in self.at:
            self.at[self.now]()
        return {r: o for r, (at, o) in self.script.items() if r in ranks and at <= self.now}

    def health(self, ranks: Collection[int]) -> Mapping[int, Health]:
        return {
            rank: Health(idle, f"stack of {rank}\n", is_in_collective=rank in self.in_collective)
            for rank in ranks
            if (idle := self.idle.get(rank, 0.0)) is not None
        }

    def interrupt(self, ranks: Collection[int], call_id: int) -> None:
        self.interrupted.append((self.now, sorted(ranks), call_id))
        if not self.stubborn:
            self.script.update(dict.fromkeys(ranks, (self.now, INTERRUPTED)))

    def describe(self, rank: int) -> str:
        return f"pid {rank} is stopped"

    def kill(self) -> None:
        self.killed_at = self.now


def run(
    ranks: Ranks, num_ranks: int, options: RayOptions = OPTIONS, send: Callable[[], None] = lambda: None
) -> dict[int, Any]:
    site = Site("policy", num_ranks, {rank: Path(f"{rank}.log") for rank in range(num_ranks)})
    return supervise(ranks, site, 1, "update() at training step 3", options, send)


def test_answers_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {0: (3, Outcome("a")), 1: (1, Outcome("b"))})
    assert run(ranks, 2) == {0: "a", 1: "b"}
    assert ranks.now == 3 and not ranks.interrupted and ranks.killed_at is None


def test_one_failure_ends_the_others_and_all_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {1: (2, OWN), 2: (1, Outcome())})
    with pytest.raises(WorkerError, match="policy rank 1 of 3 failed in update\\(\\) at training step 3: ValueError"):
        run(ranks, 3)
    assert ranks.interrupted == [(2.0, [0], 1)] and ranks.killed_at is None


def test_who_does_not_come_back_is_killed_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {1: (2, OWN)}, stubborn=True)
    with pytest.raises(WorkerError, match="rank 1 of 2"):
        run(ranks, 2)
    assert ranks.killed_at == 8.0, "failed at 2, grace of 5 over after 7"


@pytest.mark.parametrize("failure", [ECHO, ENDED])
def test_ranks_that_cannot_talk_any_more_are_killed(monkeypatch: pytest.MonkeyPatch, failure: Outcome) -> None:
    ranks = Ranks(monkeypatch, {0: (1, failure), 1: (1, Outcome())})
    with pytest.raises(WorkerError):
        run(ranks, 2)
    assert ranks.killed_at is not None


def test_the_cause_may_come_after_its_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {0: (1, ECHO), 1: (4, ENDED)}, stubborn=True)
    with pytest.raises(WorkerError, match="policy rank 1 of 2 failed .*process ended: pid 7\nafter that also: rank 0"):
        run(ranks, 2)


def test_a_call_hangs_where_no_rank_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {})
    ranks.stubborn = True
    stops = {0: 20.0, 1: 10.0}
    change = lambda: ranks.idle.update({rank: max(0.0, ranks.now - at) for rank, at in stops.items()})  # noqa: E731
    ranks.at = {float(second): change for second in range(1, 999)}
    with pytest.raises(WorkerError) as caught:
        run(ranks, 2)
    text = str(caught.value)
    assert "policy rank 1 of 2 failed in update() at training step 3: hang: no rank made progress for 60 s" in text
    assert "rank 0, without progress for" in text and "stack of 0" in text and "stack of 1" in text
    assert ranks.killed_at is not None and 80 < ranks.killed_at < 95, "the last one got on until 20"


def test_a_rank_that_gets_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {0: (500, Outcome("a")), 1: (500, Outcome("b"))})
    ranks.at = {s: lambda: ranks.idle.update({1: ranks.now}) for s in range(1, 500)}
    assert run(ranks, 2) == {0: "a", 1: "b"}


def test_the_rank_that_is_missing_in_the_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has waited for longer, but in a collective; rank 2 does not even answer in the other case."""
    for missing, idle in ((1, {}), (2, {2: None})):
        ranks = Ranks(monkeypatch, {}, stubborn=True)
        ranks.in_collective = {0, 2}
        later = [lambda r=ranks, i=idle: r.idle.update({0: r.now, 1: r.now - 5, 2: r.now} | i)] * 999
        ranks.at = {float(second): change for second, change in enumerate(later) if second > 8}
        with pytest.raises(WorkerError, match=f"policy rank {missing} of 3 failed") as caught:
            run(ranks, 3)
        assert ("does not answer: pid 2 is stopped" in str(caught.value)) is (missing == 2)


def test_ctrl_c_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that break off have all the time that they need, the group lives on."""
    ranks = Ranks(monkeypatch, {0: (90, INTERRUPTED), 1: (60, INTERRUPTED)}, stubborn=True)
    ranks.at = {5.0: lambda: os.kill(os.getpid(), signal.SIGINT)}
    with pytest.raises(KeyboardInterrupt):
        run(ranks, 2)
    assert ranks.now == 90 and ranks.killed_at is None and [ids for _, ids, _ in ranks.interrupted] == [[0, 1]]


@pytest.mark.parametrize(("pressed", "second"), [(True, 90), (True, 99), (False, 90)])  # 99: after the grace
def test_a_rank_that_a_peer_ended_over_ctrl_c_is_interrupted_too(
    monkeypatch: pytest.MonkeyPatch, pressed: bool, second: int
) -> None:
    broke_off = Outcome(failure=Failure("PeerBrokeOffError", "rank 0 broke off", is_echo=True))
    ranks = Ranks(monkeypatch, {0: (second, INTERRUPTED), 1: (90, broke_off)}, stubborn=True)
    ranks.at = {5.0: lambda: os.kill(os.getpid(), signal.SIGINT)} if pressed else {}
    with pytest.raises(KeyboardInterrupt if pressed else WorkerError):
        run(ranks, 2)
    assert ranks.killed_at is None


def test_after_a_ctrl_c_nobody_waits_longer_for_a_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer tells nothing, and is killed after the grace, not after the watchdog's minute."""
    ranks = Ranks(monkeypatch, {0: (20, ECHO)}, stubborn=True)
    ranks.at = {5.0: lambda: os.kill(os.getpid(), signal.SIGINT)}
    with pytest.raises(WorkerError):
        run(ranks, 2)
    assert ranks.killed_at is not None and 20 < ranks.killed_at < 30


def test_ctrl_c_while_a_call_is_sent_waits_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have the call by then: they are asked to break off and live on, so that a checkpoint can still be saved."""
    ranks = Ranks(monkeypatch, {})
    with pytest.raises(KeyboardInterrupt):
        run(ranks, 2, send=lambda: signal.raise_signal(signal.SIGINT))
    assert [ids for _, ids, _ in ranks.interrupted] == [[0, 1]] and ranks.killed_at is None


def test_a_call_that_could_not_be_sent_to_all_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no room for the arguments")

    ranks = Ranks(monkeypatch, {})
    with pytest.raises(OSError, match="no room"):
        run(ranks, 2, send=fail)
    assert ranks.killed_at == 0.0


def test_ctrl_c_comes_after_a_call_that_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {0: (90, Outcome("done"))}, stubborn=True)
    ranks.at = {5.0: lambda: os.kill(os.getpid(), signal.SIGINT)}
    with pytest.raises(KeyboardInterrupt):
        run(ranks, 1)
    assert ranks.now == 90 and ranks.killed_at is None


def test_a_second_ctrl_c_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {}, stubborn=True)
    ranks.at = {second: lambda: os.kill(os.getpid(), signal.SIGINT) for second in (5.0, 8.0)}
    with pytest.raises(KeyboardInterrupt):
        run(ranks, 1)
    assert ranks.killed_at == 8.0


def test_warnings_are_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    same, other = (logging.WARNING, "careful"), (logging.ERROR, "worse")
    script = {0: (1, Outcome(warnings=[same])), 1: (1, Outcome(warnings=[same, other]))}
    run(Ranks(monkeypatch, script), 2, replace(OPTIONS))
    assert [(r.levelno, r.message) for r in caplog.records] == [
        (logging.WARNING, "[policy ranks 0, 1] careful"),
        (logging.ERROR, "[policy rank 1] worse"),
    ]


def test_a_sigterm_kills_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, {}, stubborn=True)

    def end() -> None:
        raise SystemExit(143)

    ranks.at = {5.0: end}
    with pytest.raises(SystemExit):
        run(ranks, 1)
    assert ranks.killed_at == 5.0
