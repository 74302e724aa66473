"""Leases of a worker, if Ctrl-C does not wait."""

from __future__ import annotations

import pytest

from hybrid_rl.controller import RankContext
from hybrid_rl.memory.leases import Lease, Resident
from hybrid_rl.workers.base import WorkerBase


def test_a_lease_ends_also_if_an_interrupt_comes_as_it_is_being_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C is raised at once, and Python looks for signals when a function begins: also `__exit__`."""
    worker = WorkerBase(RankContext("policy"))
    for tag in ("actor", "optimizer"):
        worker.hold(Resident(tag, lambda: 8, sleep=lambda _: None, wake=lambda: None))
    monkeypatch.setattr(Lease, "__exit__", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), worker.lease(frozenset({"actor"})):
        pass
    monkeypatch.undo()
    with worker.lease(frozenset({"optimizer"})):
        assert worker.leases.awake == {"optimizer"}
