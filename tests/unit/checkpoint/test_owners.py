"""Who owns a folder: told by more than a pid, without comparing clocks, and never two at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hybrid_rl.checkpoint import owners
from hybrid_rl.checkpoint.owners import LOCK_FILE, FolderLock, Owner
from hybrid_rl.errors import ConfigError, HybridRLError, StorageError
from tests.support.inside.ranks import started_at
from tests.support.libraries.python_names import end_at_once
from tests.support.owners import ended_owner

# Without torch: `hybrid_rl.checkpoint.owners` imports none.
HOLDER = """
import os, sys, time
from pathlib import Path
from hybrid_rl.checkpoint.owners import FolderLock
lock = FolderLock(Path(sys.argv[1]))
child = os.fork() if "child" in sys.argv else 1  # a child inherits the kernel's lock
if child:
    print(os.getpid() if child == 1 else child, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """A process that has the lock of tmp_path."""
    started: list[subprocess.Popen] = []

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDER, str(tmp_path), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        process.told = int(process.stdout.readline())  # type: ignore[attr-defined]
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write(folder: Path, owner: Owner) -> Path:
    """What an owner that is not a process of this test left in the file."""
    path = folder / LOCK_FILE
    path.write_text(json.dumps(asdict(owner)))
    return path


# ------------------------------------------------------------------------------------------------------------ owners


def test_a_process_is_more_than_its_pid() -> None:
    here = Owner.here()
    assert here.standing() == "alive" and here.pid == os.getpid() and here.started > 0
    assert replace(here, started=here.started - 1).standing() == "gone"  # its pid is used again
    assert ended_owner().standing() == "gone"
    assert replace(here, namespace=here.namespace + 1).standing() == "unknown"  # a container
    assert replace(here, kernel="another").standing() == "unknown"  # a machine, or this one before it was restarted
    assert replace(here, host="renamed").standing() == "alive"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_nobody_has_waited_for_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = started_at(process.pid)
    owner = replace(Owner.here(), pid=process.pid, started=started)
    assert owner.standing() == "alive"
    process.kill()
    deadline = time.monotonic() + 20
    while owner.standing() != "gone" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert owner.standing() == "gone" and Path(f"/proc/{process.pid}").exists()
    process.communicate()


def test_tokens() -> None:
    here = replace(Owner.here(), host="node-3.of-a.cluster")
    assert Owner.of_token(here.token) == here
    assert "/" not in here.token and Owner.of_token("1234") is None and Owner.of_token("1-2-x-k-h") is None


# -------------------------------------------------------------------------------------------------------------- locks


def test_one_at_a_time(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(ConfigError, match=rf"{tmp_path} is in use by process {os.getpid()} on .* \(this process\)"):
        FolderLock(tmp_path)
    lock.check()
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    FolderLock(tmp_path).release()


def test_another_process_has_it_until_it_is_killed(tmp_path: Path, hold: Callable[..., subprocess.Popen]) -> None:
    holder = hold()
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on .*; wait for it, end it, or choose"):
        FolderLock(tmp_path)
    holder.kill()
    holder.wait()
    lock = FolderLock(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_child_that_a_killed_owner_leaves_does_not_hold_it(
    tmp_path: Path, hold: Callable[..., subprocess.Popen]
) -> None:
    """The kernel's lock goes on with every copy of the descriptor."""
    holder = hold("child")
    holder.kill()
    holder.wait()
    try:
        os.kill(holder.told, 0)  # type: ignore[attr-defined]
        FolderLock(tmp_path).release()
    finally:
        os.kill(holder.told, 9)  # type: ignore[attr-defined]


def test_of_another_container_the_kernel_tells(tmp_path: Path, hold: Callable[..., subprocess.Popen]) -> None:
    """Its pid counts elsewhere, its lock does not."""
    here = Owner.here()
    elsewhere = replace(here, namespace=here.namespace + 1)
    write(tmp_path, elsewhere)
    FolderLock(tmp_path).release()
    hold()
    write(tmp_path, elsewhere)
    with pytest.raises(ConfigError, match="is in use"):
        FolderLock(tmp_path)


@pytest.mark.parametrize("clock", [0, 4e9], ids=["1970", "2096"])
def test_of_another_machine_signs_of_life_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: float) -> None:
    """Where the kernel's lock does not reach. Its clock may show anything."""
    monkeypatch.setattr(owners, "WATCH_SECONDS", 0.5)
    path = write(tmp_path, replace(Owner.here(), kernel="of-another-machine", host="node7"))
    os.utime(path, (clock, clock))
    is_over = threading.Event()

    def live() -> None:
        tick = clock
        while not is_over.wait(0.05):
            tick += 1
            os.utime(path, (tick, tick))

    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(ConfigError, match="in use by process .* on node7; .* If it has ended, delete"):
        FolderLock(tmp_path)
    is_over.set()
    thread.join()
    FolderLock(tmp_path).release()


def test_an_owner_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "BEAT_SECONDS", 0.02)
    lock = FolderLock(tmp_path)
    seen, deadline = set(), time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < deadline:
        seen.add((tmp_path / LOCK_FILE).stat().st_mtime_ns)
        time.sleep(0.01)
    lock.release()
    assert len(seen) == 3


def test_without_locks_of_the_kernel_the_names_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_lock", lambda descriptor: None)
    monkeypatch.setattr(owners, "WATCH_SECONDS", 0.2)
    lock = FolderLock(tmp_path)
    with pytest.raises(ConfigError, match="is in use"):
        FolderLock(tmp_path)
    lock.release()
    for owner in (ended_owner(), replace(Owner.here(), namespace=7), replace(Owner.here(), kernel="other")):
        write(tmp_path, owner)
        FolderLock(tmp_path).release()


def test_a_lock_that_was_deleted_is_taken_again_unless_somebody_else_was_faster(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    lock.check()
    with pytest.raises(ConfigError, match="is in use"):
        FolderLock(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    other = FolderLock(tmp_path)
    with pytest.raises(HybridRLError, match=f"was taken over by process {os.getpid()}"):
        lock.check()
    lock.release()
    other.check()
    write(tmp_path, replace(Owner.here(), pid=1))  # as whoever took it for left over does
    with pytest.raises(HybridRLError, match="was taken over by process 1 "):
        other.check()
    other.release()
    assert (tmp_path / LOCK_FILE).exists()


def test_a_folder_that_was_away_is_still_ours(tmp_path: Path) -> None:
    """A disk that is not mounted leaves an empty folder, which is locked meanwhile; then it is mounted again."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    lock = FolderLock(folder)
    folder.rename(away)
    folder.mkdir()
    lock.check()
    folder.rename(tmp_path / "empty")
    away.rename(folder)
    lock.check()
    with pytest.raises(ConfigError, match="is in use"):
        FolderLock(folder)
    lock.release()
    assert not (folder / LOCK_FILE).exists()


def test_what_is_no_lock_file_is_taken(tmp_path: Path) -> None:
    for text in ("", "{", '{"pid": 1}', "[1]"):
        (tmp_path / LOCK_FILE).write_text(text)
        FolderLock(tmp_path).release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(StorageError, match=f"cannot lock {tmp_path}: .* use a writable folder"):
        FolderLock(tmp_path)


def test_a_fork_cannot_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        end_at_once(0)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.check()
    lock.release()
    assert not (tmp_path / LOCK_FILE).exists()
