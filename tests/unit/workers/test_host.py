from __future__ import annotations

import getpass
import resource
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_rl.workers import host
from hybrid_rl.workers.host import host_doubts, limits
from hybrid_rl.workers.preflight import RankProbe, check

Usage = namedtuple("Usage", ("total",))


@pytest.fixture(autouse=True)
def enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with all that a run needs, of which tests take something away."""
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**30))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "me")


def test_a_host_with_enough() -> None:
    assert host_doubts(2) == ()
    assert limits() == "1,024 open files (ulimit -n), 1,024 bytes locked (ulimit -l; InfiniBand needs unlimited)"


def test_the_shared_memory_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB, as Docker gives. One rank has no use for more."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * 2**20))
    (doubt,) = host_doubts(2)
    assert " holds 64 MiB, " in doubt and "--shm-size=16g" in doubt and host_doubts(1) == ()


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, num_doubts in ((1023, 1), (resource.RLIM_INFINITY, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        doubts = host_doubts(1)
        assert len(doubts) == num_doubts and all("may have 1023 files open" in doubt for doubt in doubts)
    assert limits().startswith("unlimited open files")


@pytest.mark.parametrize("home", ["/proc/nothing", "~"])
def test_no_home(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """Not there; or not known, so that libraries would make a folder with the name ~."""
    monkeypatch.setenv("HOME", home)
    (doubt,) = host_doubts(1)
    assert f"the home folder {home!r} is not there or cannot be written" in doubt and "set HOME" in doubt


@pytest.mark.parametrize("error", [KeyError, OSError])
def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """A container that runs as a number: KeyError before Python 3.13, OSError from then on."""

    def unknown() -> str:
        raise error("uid not found")

    monkeypatch.setattr(getpass, "getuser", unknown)
    (doubt,) = host_doubts(1)
    assert "has no name" in doubt and "TORCHINDUCTOR_CACHE_DIR" in doubt


def test_each_host_says_it_once() -> None:
    probe = RankProbe(0, "a", "cpu", "", 1, {}, {}, ("little",))
    assert check([probe, replace(probe, rank=1), replace(probe, rank=2, host="b")]) == ([], ["a: little", "b: little"])
    gpu = replace(probe, device="cuda H100", device_id="x")
    assert check([gpu]) == ([], ["a: little"])
