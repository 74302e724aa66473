from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.conftest import DEADLINE_SECONDS, SETUP_WORKER, Start, forked_drivers, is_running, wait_until
from tests.distributed.forks import Forks
from tests.support.memory.shared_memory import entries, left

pytestmark = pytest.mark.slow


def finish(process: subprocess.Popen[str], code: int = 0) -> list[dict[str, Any]]:
    """What a driver told, after its end."""
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code, output
    return [json.loads(line.removeprefix("TELLS ")) for line in output.splitlines() if line.startswith("TELLS ")]


def assert_nothing_left(pids: list[int], folder: str) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids), "processes are left")
    assert not Path(folder).exists()


def agents_among(pids: list[int]) -> list[int]:
    """Return Ray's agents, by the titles that they give themselves. A process that is ending has none."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(psutil.Process(pid).cmdline()[:1]).endswith("Agent"):
                found.append(pid)
    return found


@pytest.fixture(autouse=True)
def shared_memory() -> Any:
    """No test leaves anything in shared memory. Ray has none of the semaphores and segments of multiprocessing: those
    are of other programs."""
    before = entries()
    yield
    assert not [name for name in left(before) if not name.startswith(("sem.", "psm_"))]


@pytest.fixture(scope="module")
def agents() -> Iterator[list[int]]:
    """Ray's agents of drivers that were killed. For a minute each tries to tell a cluster that is gone too, and then
    ends: they must be gone when all tests of this file are done."""
    pids: list[int] = []
    yield pids
    wait_until(lambda: not any(is_running(pid) for pid in pids), "agents are left")


WHERE = "from tests.support.libraries import ray_names; folder = str(ray_names.session_folder().parent)\n"
TELL = "tell(pids=descendants(), folder=folder)\n"


def test_close_leaves_nothing_and_can_be_repeated(start_script: Start) -> None:
    """The process goes on: it connects again. (With a rank: test_a_cluster_that_loses_a_process.) Signals with which
    schedulers tell a whole job of its end do nothing to the cluster and its rank. A home folder that cannot be written
    is no obstacle: each cluster has a token of its own, which the other one does not take."""
    told = finish(
        start_script(
            f"""
            os.environ["HOME"] = "/proc"
            group, token = None, None
            for _ in range(2):
                cluster = RayCluster()
                of_gcs = next(p for p in psutil.Process().children() if "gcs_server" in p.name()).environ()
                before, token = token, of_gcs["RAY_AUTH_TOKEN"]
                if group is None:
                    group = make(cluster)
                    for pid in descendants():
                        for number in (signal.SIGUSR1, signal.SIGUSR2):
                            os.kill(pid, number)
                    assert group.patient(0.1, False) == group.patient(0.1, False)
                pids = descendants()
                {WHERE}
                mode = Path(folder).parent.stat().st_mode & 0o777
                group.close(); group.close(); cluster.close(); cluster.close()
                folder = str(Path(folder).parent)
                tell(pids=pids, folder=folder, left=descendants(), connected=ray.is_initialized(), mode=mode,
                     is_new=len(token) == 64 != before, kept=[n for n in os.environ if n.startswith("RAY_AUTH")])
            """
        )
    )
    assert len(told) == 2
    for one, fewest in zip(told, (5, 4), strict=True):
        assert len(one["pids"]) >= fewest and one["left"] == [] and not one["connected"]
        assert one["mode"] == 0o700  # Ray's own folder, below, is open to everybody
        assert one["is_new"] and one["kept"] == []
        assert_nothing_left(one["pids"], one["folder"])


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise ValueError", 1),
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import gc; del group; gc.collect()", 0),
    ],
)
@pytest.mark.sweep
def test_a_driver_that_does_not_close(start_script: Start, end: str, code: int) -> None:
    told = finish(
        start_script(f"cluster = RayCluster()\ngroup = make(cluster)\n{WHERE}{TELL}{end}\n"),
        code,
    )
    assert_nothing_left(**told[0])


def test_a_killed_driver_leaves_no_process(start_script: Start, start_fork: Start, agents: list[int]) -> None:
    """With children of the ranks. Its folder is removed by the next driver."""
    code = f"cluster = RayCluster()\ngroup = make(cluster)\ngroup.start_child()\n{WHERE}{TELL}"
    process = start_script(code + "group.patient(3600.0, True)\n")
    assert process.stdout is not None
    told = json.loads(next(line for line in process.stdout if line.startswith("TELLS ")).removeprefix("TELLS "))
    wait_until(lambda: len(agents_among(told["pids"])) == 2, "Ray has not started its agents")
    late = agents_among(told["pids"])
    others = [pid for pid in told["pids"] if pid not in late]
    assert len(others) >= 4
    process.kill()
    agents += late
    wait_until(lambda: not any(is_running(pid) for pid in others), "processes are left")
    assert Path(told["folder"]).exists()
    finish(start_fork("RayCluster().close()"))
    assert not Path(told["folder"]).exists()


@pytest.mark.sweep
def test_a_sigterm_ends_the_driver_in_order(start_script: Start) -> None:
    code = f"cluster = RayCluster()\ngroup = make(cluster)\n{WHERE}{TELL}group.patient(3600.0, False)\n"
    process = start_script(code)
    assert process.stdout is not None
    told = json.loads(next(line for line in process.stdout if line.startswith("TELLS ")).removeprefix("TELLS "))
    process.terminate()  # while it waits in a call of Ray's
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 143 and "SIGTERM received" not in output, output  # as Ray's own handler says
    assert_nothing_left(**told)


def test_a_sigterm_while_a_cluster_starts_is_the_programs(start_script: Start) -> None:
    """Its own handler is called, not Ray's, and what has started by then ends."""
    told = finish(
        start_script(
            """
            import signal, threading
            class Stopped(BaseException):
                pass
            def stop(number, frame):
                raise Stopped
            def send():
                while "raylet" not in [one.name() for one in psutil.Process().children()]:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
            signal.signal(signal.SIGTERM, stop)
            threading.Thread(target=send, daemon=True).start()
            try:
                RayCluster()
            except Stopped:
                tell(left=descendants(), is_ours=signal.getsignal(signal.SIGTERM) is stop)
            """
        )
    )
    assert told == [{"left": [], "is_ours": True}]


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
@pytest.mark.sweep
def test_a_cluster_that_loses_a_process(start_script: Start, name: str) -> None:
    """One error at once, where Ray would abort the driver after a minute; then everything works again."""
    told = finish(
        start_script(
            f"""
            import threading
            for _ in range(2):
                cluster = RayCluster()
                group = make(cluster)
                pids = descendants()
                lost = next(p for p in psutil.Process().children() if {name!r} in p.name())
                threading.Timer(1.0, lost.kill).start()
                {WHERE}
                try:
                    group.patient(3600.0, True)
                except Exception as error:
                    tell(kind=type(error).__name__, error=str(error), lost=lost.pid)
                group.close(); cluster.close()
                tell(pids=pids, folder=folder)
            """
        )
    )
    for failure, rest in (told[:2], told[2:]):
        assert failure["kind"] == "WorkerError"
        assert f"failed in patient(): cluster ended: {name} (pid {failure['lost']}) of the Ray" in failure["error"]
        assert_nothing_left(**rest)


# -------------------------------------------------------------------------------------------- a cluster of two nodes

HAS_TOKEN = 'os.environ["RAY_AUTH_TOKEN"] = "0123456789abcdef" * 4\n'
USES_TOKEN = (
    HAS_TOKEN
    + """
from tests.support.libraries.ray_names import read_settings_again
os.environ["RAY_AUTH_MODE"] = "token"
read_settings_again()
"""
)
HEAD = (
    USES_TOKEN
    + """
import tempfile
from ray.cluster_utils import Cluster
with tempfile.TemporaryDirectory(prefix="r") as folder:
    os.environ["RAY_TMPDIR"] = folder
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    second = cluster.add_node(num_cpus=2)
    tell(address=cluster.address)
    if sys.stdin.readline().strip() == "lose a node":
        cluster.remove_node(second)
        sys.stdin.read()
    cluster.shutdown()
"""
)
JOINS = f"""
os.environ["RAY_AUTH_TOKEN"] = "f" * 64
try:
    RayCluster(%r)
except Exception as error:
    tell(kind=type(error).__name__, error=str(error))
{HAS_TOKEN}
cluster = RayCluster(%r)
group = make(cluster, 3, placement="pack")
from tests.support.inside.ranks import places_of
nodes = [place.node for place in places_of(group)]
tell(sum=group.all_reduce(), nodes=nodes, threads=[about["env"]["OMP_NUM_THREADS"] for about in group.about()])
group.close()
cluster.close()
"""
LOSES = f"""
{HAS_TOKEN}
cluster = RayCluster(%r)
group = make(cluster, 2, placement="spread")
tell(ready=True)
try:
    group.patient(3600.0, True)
except Exception as error:
    tell(kind=type(error).__name__, error=str(error))
group.close()
cluster.close()
"""
OF_THE_USER = f"""
{USES_TOKEN}
ray.init(address=%r)
cluster = RayCluster()
group = make(cluster, 2)
tell(sum=group.all_reduce())
try:
    make(cluster, 5)
except Exception as error:
    tell(error=str(error))
group.close()
cluster.close()
tell(connected=ray.is_initialized())
try:
    RayCluster("other:6379")
except Exception as error:
    tell(error=str(error))
ray.shutdown()
"""


@pytest.mark.sweep
def test_a_cluster_that_runs_already(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two nodes of two cores, which drivers join one after the other. It outlives them, and the last loses a node."""
    with forked_drivers(tmp_path_factory.mktemp("joined"), forks) as start:
        head = start(HEAD)
        assert head.stdout is not None and head.stdin is not None
        line = next(line for line in head.stdout if line.startswith("TELLS "))
        address = json.loads(line.removeprefix("TELLS "))["address"]
        refused, joined = finish(start(JOINS % (address, address)))
        user = finish(start(OF_THE_USER % address))
        loses = start(LOSES % address)
        assert loses.stdout is not None
        next(line for line in loses.stdout if line.startswith("TELLS "))
        head.stdin.write("lose a node\n")
        head.stdin.flush()
        (lost,) = finish(loses)
        assert head.poll() is None
        finish(head)
    assert refused["kind"] == "ConfigError"
    assert "it has token authentication, and does not take the token of this process" in refused["error"]
    assert joined["sum"] == [6.0] * 3
    # Ranks are neighbours in order of their nodes.
    assert len(set(joined["nodes"])) == 2 and joined["nodes"] == sorted(joined["nodes"])
    assert sorted(joined["threads"]) == ["1", "1", "2"]
    assert user[0] == {"sum": [3.0, 3.0]}
    assert "5 ranks of 1 CPU each do not fit into the cluster, which has room for 4" in user[1]["error"]
    assert user[2] == {"connected": True}, "a cluster of the user stays"
    assert "ray address 'other:6379': ray.init has connected this process to" in user[3]["error"]
    assert lost["kind"] == "WorkerError" and "failed in patient(): node lost: " in lost["error"]
    assert "is not in the Ray cluster any more" in lost["error"] and "it was killed (by hand" not in lost["error"]


# ------------------------------------------------------------------------------ a driver to which all of this happens

DRIVER = """
import gc, threading
from hybrid_rl.errors import HybridRLError
from tests.distributed.conftest import is_running, wait_until
from tests.support.libraries import ray_names
from tests.support.libraries.python_names import end_at_once

services = ray_names.services()

def refusal(address):
    try:
        RayCluster(address)
    except Exception as error:
        return {"kind": type(error).__name__, "error": str(error)}

tell(nobody=refusal("127.0.0.1:1"))
kept = {name: getattr(services, name) for name in ("find_gcs_addresses", "find_bootstrap_address")}
kept["resolve_ip_for_localhost"] = services.resolve_ip_for_localhost
services.find_gcs_addresses = lambda: set()
services.find_bootstrap_address = lambda folder: "127.0.0.1:1"
services.resolve_ip_for_localhost = lambda host: host
tell(gone=refusal("auto"))
for name, function in kept.items():
    setattr(services, name, function)

made = []
thread = threading.Thread(target=lambda: made.append(RayCluster()))
thread.start()
thread.join()
group = make(made[0])
tell(thread=group.gather("x"))
pid = os.fork()
if pid == 0:
    group.close(); made[0].close()
    end_at_once(3)
tell(child=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), gathered=group.gather("x"))
pids = [about["pid"] for about in group.about()]
del group
gc.collect()
wait_until(lambda: not any(map(is_running, pids)), "ranks are left")
tell(dropped=pids)

told = []
for _ in range(2):
    cluster = RayCluster()
    made.clear()
    gc.collect()
    group = make(cluster)
    clusters = sum("gcs_server" in process.name() for process in psutil.Process().children())
    told.append([group.gather("x"), clusters])
tell(twice=told)

refused = []
for close in (lambda: group.close(), lambda: cluster.close()):
    batch = group.score(sample_batch(2, 2), 2.0)
    assert batch.load().num_samples == 4
    group.close()
    close()
    try:
        batch.load()
    except HybridRLError as error:
        refused.append(str(error))
    if len(refused) == 1:
        sys.path.insert(0, str(FOLDER / "mods"))
        import only_here
        class Asking(Probe):
            def __init__(self, context):
                super().__init__(context)
                assert only_here.asked() == str(FOLDER)
        Probe = Asking
        group = make(cluster)
        tell(modules=group.gather("x"))
tell(refused=refused)
tell(left=descendants(), connected=ray.is_initialized())
"""


def test_what_a_driver_lives_through(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All of it happens to one driver, and to its one cluster."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "mods").mkdir()
    (folder / "mods" / "only_here.py").write_text("import sys\ndef asked(): return sys.argv[1]\n")
    with forked_drivers(folder, forks) as start:
        story = {name: value for told in finish(start(DRIVER)) for name, value in told.items()}
    nobody, gone = story["nobody"], story["gone"]
    assert nobody["kind"] == gone["kind"] == "ConfigError"
    assert "ray address '127.0.0.1:1' cannot be used" in nobody["error"]
    # What the last `ray start` left: refused at once, with the address that it had.
    assert gone["error"].startswith("ray address 'auto' (found at 127.0.0.1:1) cannot be used: ConnectionRefused")
    assert story["thread"] == [[[0, "x"]]], "a cluster started in a thread outlives it"
    assert story["child"] == 3 and story["gathered"] == [[[0, "x"]]], "a forked child ends no ranks"
    assert story["dropped"], "a group that is dropped ends its ranks"
    # A cell run twice replaces names without closing anything; two groups overlap for a while.
    assert story["twice"] == [[[[[0, "x"]]], 1]] * 2
    assert story["modules"] == [[[0, "x"]]], "modules that only the driver finds"
    # Ray would start another cluster for a batch, or wait for one. With the last hold all has ended.
    assert story["refused"] == ["the workers of this batch have ended: load() a batch before close()"] * 2
    assert story["left"] == [] and story["connected"] is False


def test_ray_is_loaded_when_it_is_needed(forks: Forks, tmp_path: Path) -> None:
    """In a fork of a server that has imported half of the library."""
    script = tmp_path / "script.py"
    script.write_text("import sys, hybrid_rl, hybrid_rl.controller, hybrid_rl.run.trainer; print('ray' in sys.modules)")
    with forks.used():
        answer = subprocess.run(
            [sys.executable, str(SETUP_WORKER), str(script)],
            env={**os.environ, **forks.environment()},
            capture_output=True,
            text=True,
            check=True,
        )
    assert answer.stdout.strip() == "False"
