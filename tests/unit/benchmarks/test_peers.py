"""Sides that fail say why, and leave nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import peers
from benchmarks.side import Job
from benchmarks.workload import Work

pytestmark = pytest.mark.slow

JOB = Job(Work("small"), folder="", output="", num_steps=1, threads=1, seed=0, learning_rate=1e-6)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_a_side_that_cannot_start_shows_its_stderr() -> None:
    before = children()
    with (
        pytest.raises(peers.SideFailed, match=r"'broken' ended with status 1.*\n.*No module named"),
        peers.Side("broken", sys.executable, "benchmarks.no_such_side", JOB) as side,
    ):
        side.wait_ready()
    assert children() <= before


def test_a_side_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deaf.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(peers, "PATIENCE_SECONDS", 0.1)
    before = children()
    with peers.Side("deaf", sys.executable, "deaf", JOB):
        assert len(children() - before) == 1
    assert children() <= before


def test_the_same_job_arrives() -> None:
    values = {**vars(JOB), "work": vars(JOB.work)}
    assert Job.of(values) == JOB


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(peers.SideFailed, match="does not exist"):
        peers.trl_python(tmp_path / "python")


def test_other_versions_are_refused() -> None:
    ours, peer = (peers.Side.__new__(peers.Side) for _ in range(2))
    ours.ready = {"versions": {"torch": "2.13.0+cpu"}}
    for versions, wrong in (({"trl": "1.17.0"}, "trl 1.17.0"), ({"trl": "1.16.2", "torch": "2.12.0"}, "torch is")):
        peer.ready = {"versions": versions}
        with pytest.raises(peers.SideFailed, match=wrong):
            peers.check_versions(ours, peer)
    peer.ready = {"versions": {"trl": "1.16.2", "torch": "2.13.0+cu130"}}
    peers.check_versions(ours, peer)
