"""Worker groups on Ray, all on one small local cluster; and drivers in processes of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid_rl.controller import RankMesh
from hybrid_rl.controller.placement import RayOptions
from tests.distributed.forks import Forks
from tests.support.groups import OpenGroup
from tests.support.libraries.ray_names import start_ranks_with

ROOT = Path(__file__).parents[2]
SETUP_WORKER = Path(__file__).with_name("setup_worker.py")
DEADLINE_SECONDS = 240.0
# Of a driver that is a fork, whose ranks are forks too.
FORKED_START = f"""
from tests.support.libraries.ray_names import start_ranks_with
start_ranks_with({str(SETUP_WORKER)!r})
"""
SCRIPT_START = """
import json, os, signal, sys, time
from pathlib import Path
import psutil, ray
from hybrid_rl.controller import RankMesh
from hybrid_rl.controller.placement import RayOptions
from hybrid_rl.controller.ray_backend import RayActors, RayCluster
from hybrid_rl.controller.remote import RemoteBackend
from tests.distributed.workers import Probe, sample_batch, split_whole_groups
from tests.support.groups import OpenGroup

FOLDER = Path(sys.argv[1])

def make(cluster, num_ranks=1, role="policy", **options):
    backend = RemoteBackend(role, Probe, mesh=RankMesh(dp_shard=num_ranks), splitter=split_whole_groups,
                         ranks=RayActors(cluster), options=RayOptions(**options), log_folder=FOLDER)
    return OpenGroup(Probe, backend)

def tell(**values):
    print("TELLS " + json.dumps(values), flush=True)

def descendants():
    return [process.pid for process in psutil.Process().children(recursive=True)]
"""


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with tempfile.TemporaryDirectory(prefix="hrl-forks-") as folder:
        forks = Forks(Path(folder))
        yield forks
        forks.close()


@pytest.fixture(scope="session")
def cluster(forks: Forks) -> Iterator[Any]:
    from hybrid_rl.controller.ray_backend import RayCluster

    with pytest.MonkeyPatch.context() as patch:
        start_ranks_with(SETUP_WORKER, patch)
        for name, value in forks.environment().items():
            patch.setenv(name, value)
        cluster = RayCluster(object_store_memory_bytes=150 * 2**20)
    yield cluster
    cluster.close()


@pytest.fixture
def forked_ranks(cluster: Any, forks: Forks) -> Iterator[Any]:
    """The cluster, whose ranks are forks while the test runs: they have imported all already."""
    with forks.used():
        yield cluster


def start_group(
    cluster: Any, logs: Path, num_ranks: int = 2, *, role: str = "policy", make_worker: Any = None, **options: Any
) -> OpenGroup:
    """A group of Probe workers, which whoever asks for it closes."""
    from hybrid_rl.controller.ray_backend import RayActors
    from hybrid_rl.controller.remote import RemoteBackend
    from tests.distributed.workers import Probe, split_whole_groups

    backend = RemoteBackend(
        role,
        make_worker or Probe,
        mesh=RankMesh(dp_shard=num_ranks),
        splitter=split_whole_groups,
        ranks=RayActors(cluster),
        options=RayOptions(**options),
        log_folder=logs,
    )
    return OpenGroup(Probe, backend)


@pytest.fixture
def make_group(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., OpenGroup]]:
    """Groups of Probe workers, closed when the test ends. Arguments: those of `start_group`."""
    made: list[OpenGroup] = []

    def make(num_ranks: int = 2, **keys: Any) -> OpenGroup:
        made.append(start_group(cluster, tmp_path / "logs", num_ranks, **keys))
        return made[-1]

    yield make
    for group in made:
        group.close()


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Start]:
    """Run Python code as a driver of its own, after SCRIPT_START."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        started.append(_start(code, tmp_path / f"driver{len(started)}.py", []))
        return started[-1]

    yield start
    _end(started)


@pytest.fixture
def start_fork(tmp_path: Path, forks: Forks) -> Iterator[Start]:
    """The same with a fork, whose ranks are forks. What is returned is the process that waits for the fork: to kill a
    driver, or to look at its end, takes a real one."""
    with forked_drivers(tmp_path, forks) as start:
        yield start


@contextlib.contextmanager
def forked_drivers(folder: Path, forks: Forks) -> Iterator[Start]:
    """What `start_fork` gives, for fixtures of other scopes."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        path = folder / f"fork{len(started)}.py"
        code = FORKED_START + textwrap.dedent(code)
        started.append(_start(code, path, [str(SETUP_WORKER)], **forks.environment()))
        return started[-1]

    with forks.used():
        yield start
        _end(started)


def _start(code: str, path: Path, command: list[str], **environment: str) -> subprocess.Popen[str]:
    path.write_text(SCRIPT_START + textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, *command, str(path), str(path.parent)],
        env={**psutil.Process().environ(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _end(started: list[subprocess.Popen[str]]) -> None:
    for process in started:
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """A generous deadline for something that must happen."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
