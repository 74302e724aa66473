"""Seconds from a fresh clone to the end of installation and to the first training step, of two versions.

`python benchmarks/installation.py --old main --new HEAD --runs 3` clones this repository for each run, with empty
caches of pip and uv, and alternates between the versions. Both run `make run`; a training step is there when it is in
metrics.jsonl. With --install-only it stops when the installation is complete. --uv: with the uv that is on the path,
otherwise it is hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMPS = (".venv/.runs", ".venv/.installed")  # the first is that of `make run`, which older versions have not
LIMIT_SECONDS = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default="main", help="a commit or branch")
    parser.add_argument("--new", default="HEAD", help="a commit or branch")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--uv", action="store_true")
    asked = parser.parse_args()
    measurements: dict[str, list[dict[str, float]]] = {asked.old: [], asked.new: []}
    for _ in range(asked.runs):
        for version, runs in measurements.items():
            runs.append(measure(version, with_uv=asked.uv, only_install=asked.install_only))
            print(json.dumps({"version": version, "load": os.getloadavg()[0], **runs[-1]}), flush=True)
    for name in measurements[asked.old][0]:
        old, new = (statistics.median(run[name] for run in measurements[version]) for version in (asked.old, asked.new))
        print(f"{name}: {old:.0f} s -> {new:.0f} s, {new / old:.2f} of the time (medians of {asked.runs})")


def measure(version: str, *, with_uv: bool, only_install: bool) -> dict[str, float]:
    """Return seconds by name, counted from the beginning of the clone."""
    with tempfile.TemporaryDirectory(prefix="installation-") as folder:
        clone = Path(folder, "hybrid_rl")
        variables = environment(Path(folder), with_uv=with_uv)
        began = time.monotonic()
        commit = subprocess.run(
            ["git", "rev-parse", version], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        # Not by hard links, and without checking out the present branch first.
        subprocess.run(["git", "clone", "-q", "--no-checkout", f"file://{ROOT}", clone], check=True)
        subprocess.run(["git", "-C", clone, "checkout", "-q", commit], check=True)
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(
                ["make", "run"], cwd=clone, env=variables, stdout=log, stderr=log, start_new_session=True
            )
            try:
                return wait(process, clone, began, only_install=only_install)
            except RuntimeError:
                print(Path(folder, "log").read_text()[-3000:], file=sys.stderr)
                raise
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait(process: subprocess.Popen[bytes], clone: Path, began: float, *, only_install: bool) -> dict[str, float]:
    seconds: dict[str, float] = {}
    while time.monotonic() - began < LIMIT_SECONDS:
        passed = time.monotonic() - began
        if "installed" not in seconds and any((clone / stamp).exists() for stamp in STAMPS):
            seconds["installed"] = passed
        if "installed" in seconds and only_install:
            return seconds
        if any('"step": 1' in path.read_text() for path in clone.glob("runs/*/metrics.jsonl")):
            return {**seconds, "first training step": passed}
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"make run has not come to a training step (status {process.poll()})")


def environment(folder: Path, *, with_uv: bool) -> dict[str, str]:
    """Return an environment with empty caches, and with uv only on request."""
    path = os.environ["PATH"].split(os.pathsep)
    if not with_uv:
        path = [entry for entry in path if shutil.which("uv", path=entry) is None]
    caches = {"PIP_CACHE_DIR": str(folder / "pip"), "UV_CACHE_DIR": str(folder / "uv"), "PIP_NO_CACHE_DIR": "1"}
    return {**os.environ, **caches, "PATH": os.pathsep.join(path)}


if __name__ == "__main__":
    main()
