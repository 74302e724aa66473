from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.controller import session
from tests.support.inside.ranks import remove_if_left
from tests.support.libraries.python_names import end_at_once

# The module without its package, which imports torch.
ALONE = f"import runpy; from types import SimpleNamespace as N; session = N(**runpy.run_path({session.__file__!r}))"


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Short, as sockets want it."""
    with tempfile.TemporaryDirectory(prefix="p") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_the_folder_goes_with_the_block(parent: Path) -> None:
    with pytest.raises(KeyError), session.temporary_folder("mine-") as folder:
        assert folder.parent == parent and folder.name.startswith("mine-")
        (folder / "inside").mkdir()
        raise KeyError
    assert list(parent.iterdir()) == []


def test_what_a_killed_process_left_is_removed(parent: Path) -> None:
    """Folders in use stay, as do those of others."""
    code = (
        f"import tempfile, time; {ALONE}\n"
        f"tempfile.tempdir = {str(parent)!r}\n"
        "with session.temporary_folder('mine-'): print('made', flush=True); time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
        (left,) = parent.iterdir()
        (parent / "mine-not").mkdir()
        with session.temporary_folder("mine-"):
            assert left.exists()
        process.kill()
        process.wait()
    with session.temporary_folder("mine-"):
        assert not left.exists() and (parent / "mine-not").exists()


def test_a_folder_that_is_just_being_made_is_not_taken_for_one_that_was_left(parent: Path, monkeypatch) -> None:
    """Another process looks for what was left just before the new folder is locked."""
    lock = session.fcntl.flock

    def late(file: Any, how: int) -> None:
        if how == session.fcntl.LOCK_EX:
            for other in parent.glob("mine-*"):
                remove_if_left(other)
        lock(file, how)

    monkeypatch.setattr(session.fcntl, "flock", late)
    with session.temporary_folder("mine-") as folder:
        assert folder.is_dir() and [*parent.iterdir()] == [folder]


def test_a_long_path_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 50)))
    with session.temporary_folder("mine-") as folder:
        assert len(str(folder)) < 40
    longest = "/hrl-ray-12345678/r/session_2026-01-02_03-04-05_123456_4194304/sockets/plasma_store"
    assert session.MAX_PARENT_LENGTH + len(longest) == 107


def test_the_thread_lives_as_long_as_the_block() -> None:
    seen: list[threading.Thread] = []

    def use() -> None:
        with session.alive_thread(lambda: seen.append(threading.current_thread())):
            assert seen[0] is not threading.current_thread() and seen[0].is_alive()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    seen[0].join(60)
    assert not seen[0].is_alive()
    with session.alive_thread(lambda: seen.append(threading.current_thread())):
        assert seen[1] is threading.main_thread()


def test_what_the_thread_raises_is_raised() -> None:
    caught: list[BaseException] = []

    def use() -> None:
        try:
            with session.alive_thread(lambda: [][0]):
                raise AssertionError("not reached")
        except IndexError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_the_end_comes_once() -> None:
    class Owner:
        pass

    ended: list[str] = []
    owner = Owner()
    end = session.at_end(owner, ended.append, "x")
    end()
    end()
    del owner
    gc.collect()
    assert ended == ["x"]
    owner = Owner()
    session.at_end(owner, ended.append, "dropped")
    del owner
    gc.collect()
    assert ended == ["x", "dropped"]


def test_the_end_of_the_program_comes_before_that_of_libraries() -> None:
    code = (
        "import atexit, weakref\n"
        "class Owner: pass\n"
        "early = Owner(); weakref.finalize(early, print, 'weakref')\n"
        "atexit.register(print, 'library')\n"
        f"{ALONE}\n"
        "owner = Owner(); session.at_end(owner, print, 'ours')"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["ours", "library", "weakref"]


def test_a_forked_child_ends_nothing_of_its_parent() -> None:
    code = (
        "import os, sys\n"
        "class Owner: pass\n"
        f"{ALONE}\n"
        "owner = Owner(); end = session.at_end(owner, print, 'ended')\n"
        "pid = os.fork()\n"
        "if pid == 0: end(); sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["3", "ended"]


def test_a_sigterm_ends_the_program_in_order() -> None:
    """Where it was the system's own business; a handler of the user stays."""
    before = signal.getsignal(signal.SIGTERM)
    told: list[int] = []

    def handler(number: int, frame: Any) -> None:
        told.append(number)

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(SystemExit) as caught, session.sigterm_exits():
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, handler)
        with session.sigterm_exits():
            os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        session.check_reachable(f"127.0.0.1:{listener.getsockname()[1]}")
        free = listener.getsockname()[1]
    with pytest.raises(OSError):
        session.check_reachable(f"127.0.0.1:{free}")
    session.check_reachable("auto")
    session.check_reachable("ray://somewhere:1")


@pytest.mark.usefixtures("parent")
def test_a_fork_does_not_remove_the_folder_of_its_parent() -> None:
    """It comes to the end of the block as its parent does."""
    with session.temporary_folder("mine-") as folder:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            assert folder.is_dir()
    if not child:
        end_at_once(0)
    assert not folder.exists()


def test_a_sigterm_comes_after_what_must_not_be_broken_off() -> None:
    """Once, with the status of a SIGTERM; what fails in between is not lost, and in a thread nothing waits."""
    done: list[str] = []
    with session.sigterm_exits():
        with pytest.raises(SystemExit) as ended, session.sigterm_waits():
            with session.sigterm_waits():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        assert ended.value.code == 143 and done == ["inner", "outer"]
        with session.sigterm_waits():
            done.append("again")
        with pytest.raises(SystemExit) as late, session.sigterm_waits():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("of the call")
        assert isinstance(late.value.__context__, ValueError)
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("too much")
    assert done == ["inner", "outer", "again"]
