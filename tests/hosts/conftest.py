"""Two hosts as namespaces of this machine, with a Ray cluster over both of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
APART = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
SECONDS = 600.0
ADDRESS = "10.77.0.1:6399"
# A cluster with authentication: the driver has the token, and nobody tells it to use it.
TOKEN = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@dataclass
class Hosts:
    """The hosts nodea and nodeb. folder: short, as the paths of sockets are; both see it. pids: of a process on each of
    them, by name."""

    folder: Path
    pids: dict[str, int]

    def run(self, node: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host. What it leaves running writes into the same files."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": str(self.folder / "ray"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",  # Ray itself waits for 45 s, too few on a busy machine
            "HOSTS": str(self.folder),
            **variables,
        }
        inside = ["nsenter", "-t", str(self.pids[node]), "-n", "-u", "-m", "-p", *command]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code = subprocess.run(inside, env=environment, cwd=ROOT, stdout=out, stderr=err, timeout=SECONDS).returncode
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        return subprocess.CompletedProcess(inside, code, *texts)


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Skips where namespaces are not allowed."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"two hosts need {program} (Debian and Ubuntu: util-linux, iproute2)")
    tried = subprocess.run([*APART, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"two hosts need namespaces, which this user may not make here: {tried.stderr.strip()}")
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        command = [*APART, "bash", str(HERE / "up.sh"), folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "up\n", "the hosts did not come up"
                below = psutil.Process(process.pid).children(recursive=True)
                names = {process.cmdline()[0]: process.pid for process in below}
                yield Hosts(Path(folder), {node: names[f"{node}-of-tests"] for node in ("nodea", "nodeb")})
            finally:
                process.kill()


@pytest.fixture(scope="session")
def cluster(hosts: Hosts) -> Hosts:
    """The hosts, with a Ray cluster that has token authentication."""
    ray = str(Path(sys.executable).with_name("ray"))
    common = ["--num-cpus=1", "--object-store-memory=150000000"]
    head = ["--head", "--port=6399", "--node-ip-address=10.77.0.1", "--include-dashboard=false", *common]
    for node, options in (
        ("nodea", head),
        ("nodeb", [f"--address={ADDRESS}", "--node-ip-address=10.77.0.2", *common]),
    ):
        done = hosts.run(node, ray, "start", *options, RAY_AUTH_MODE="token", **TOKEN)
        assert done.returncode == 0, done.stdout + done.stderr
    return hosts
