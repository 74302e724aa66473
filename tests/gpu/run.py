"""`make gpu`: the tests of this folder and the benchmarks benchmarks/gpu_*.py on a CUDA machine, into one dated file.

Needs no network and installs nothing: it takes the Python that runs it, says what is missing there, builds csrc in
place where a compiler is, runs each file in a process of its own with a time limit, and writes what it has after every
one, so that nothing that fails, hangs or is cut off hides the rest.

Exit status: 0, all passed; 1, something failed or ran out of time; 3, this machine cannot run it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CANNOT_RUN = 3
BUILD_SECONDS, TEST_SECONDS, BENCHMARK_SECONDS = 300, 300, 600
TAIL_LINES = 25  # of the output of what failed

# import name -> what it is for. Without one of these nothing here runs.
REQUIRED = {
    "torch": "a build with CUDA",
    "transformers": "the models",
    "tokenizers": "the models",
    "numpy": "the tests",
    "omegaconf": "the configuration",
    "rich": "the progress line",
    "safetensors": "checkpoints",
    "cloudpickle": "reward processes",
    "psutil": "memory probes",
    "pytest": "the tests",
}
# Without these less is run, which the report says.
OPTIONAL = {
    "triton": "the decode kernel and the fused head",
    "pytest_timeout": "limits of single tests",
    "setuptools": "building csrc",
    "flash_attn": "attention=flash_attn",
    "vllm": "rollout.engine=vllm",
}


@dataclass(frozen=True)
class Outcome:
    """How a process ended. status: passed, failed or timeout; output: stdout and stderr together, in order."""

    status: str
    seconds: float
    output: str


def run_limited(command: list[str], root: Path, limit_seconds: float, environment: Mapping[str, str]) -> Outcome:
    """Run a command in `root`; past the limit it and everything it started is killed, what it printed is kept."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=root, env=dict(environment), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "passed" if process.wait(limit_seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Outcome(status, time.monotonic() - start, text)


def child_environment(root: Path) -> dict[str, str]:
    """This process's environment, with the repository first on the import path."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def missing(names: Iterable[str]) -> list[str]:
    """Those of the import names that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def obstacles() -> list[str]:
    """Why nothing can be run here, one line each; empty where it can."""
    absent = ", ".join(f"{name} ({REQUIRED[name]})" for name in missing(REQUIRED))
    lines = []
    if absent:
        lines.append(
            f"{sys.executable} cannot import {absent}; name another Python (GPU_PYTHON=...), install them, or name "
            f"their folder in PYTHONPATH"
        )
    if "torch" not in missing(["torch"]):
        import torch  # takes seconds, and may not be there

        if torch.version.cuda is None:
            lines.append(f"torch {torch.__version__} is built without CUDA")
        elif not torch.cuda.is_available():
            lines.append(f"torch {torch.__version__} finds no CUDA device (see nvidia-smi)")
    return lines


def describe_machine() -> dict[str, Any]:
    """Device, driver and versions. Only on a machine without obstacles."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    packages = ("torch", "triton", "transformers", "numpy", "flash-attn", "vllm")
    return {
        "device": properties.name,
        "num_devices": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: version for name in packages if (version := _version(name)) is not None},
    }


def commit_of(root: Path) -> dict[str, Any]:
    """The commit that was run and whether files differed from it; None where this is no git checkout."""
    commit = _first_line(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = _first_line(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit, "changed": None if commit is None else changed is not None}


def _first_line(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def build_extension(root: Path, python: str) -> dict[str, Any]:
    """Compile csrc into hybrid_rl/_native.so; says why not where it cannot. Never an error: PyTorch stands in."""
    if "setuptools" in missing(["setuptools"]):
        return {"built": False, "why": "setuptools cannot be imported"}
    command = [python, "setup.py", "build_ext", "--inplace"]
    outcome = run_limited(command, root, BUILD_SECONDS, child_environment(root))
    built = outcome.status == "passed" and (root / "hybrid_rl" / "_native.so").exists()
    lines = [line for line in outcome.output.splitlines() if "without the compiled extension" in line]
    why = lines[0] if lines else tail(outcome.output, 1) or outcome.status
    return {"built": built, "seconds": round(outcome.seconds, 1)} | ({} if built else {"why": why})


def run_tests(root: Path, python: str, file: Path, limit_seconds: float) -> dict[str, Any]:
    """One test file in a process of its own: counts, and the end of the output where not all passed."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [python, "-m", "pytest", "-q", "-ra", f"--junitxml={junit}", str(file.relative_to(root))]
        outcome = run_limited(command, root, limit_seconds, child_environment(root))
        counts = count_tests(junit.read_text()) if junit.exists() else {}
    status = "failed" if outcome.status == "passed" and not counts else outcome.status
    entry = {"file": file.relative_to(root).as_posix(), "status": status, "seconds": round(outcome.seconds, 1)}
    return entry | counts | ({} if status == "passed" else {"output": tail(outcome.output, TAIL_LINES)})


def count_tests(junit: str) -> dict[str, Any]:
    """passed, failed and skipped of pytest's JUnit report, with the names of what failed and the reasons of skips."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [found for c in cases if (found := c.find("skipped")) is not None]
    counts: dict[str, Any] = {"passed": len(cases) - len(failed) - len(skipped), "failed": len(failed)}
    counts["skipped"] = len(skipped)
    if failed:
        counts["failures"] = [str(c.get("name")) for c in failed]
    if skipped:
        counts["skip_reasons"] = sorted({str(s.get("message")) for s in skipped})
    return counts


def run_benchmark(root: Path, python: str, file: Path, limit_seconds: float) -> dict[str, Any]:
    """One benchmark in a process of its own: every line of JSON that it printed."""
    command = [python, str(file.relative_to(root))]
    outcome = run_limited(command, root, limit_seconds, child_environment(root))
    lines = benchmark_lines(outcome.output)
    status = "failed" if outcome.status == "passed" and not lines else outcome.status
    entry = {"file": file.relative_to(root).as_posix(), "status": status, "seconds": round(outcome.seconds, 1)}
    output = {} if status == "passed" else {"output": tail(outcome.output, TAIL_LINES)}
    return entry | {"lines": lines} | output


def benchmark_lines(output: str) -> list[dict[str, Any]]:
    """The lines of an output that are JSON objects with a key "benchmark"."""
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and "benchmark" in record:
                found.append(record)
    return found


def tail(text: str, num_lines: int) -> str:
    """The last lines of a text."""
    return "\n".join(text.strip().splitlines()[-num_lines:])


def report_path(folder: Path, started: datetime, device: str) -> Path:
    """gpu-<date>-<device>.json, the date with the time of day in UTC: one file per run."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"gpu-{started:%Y%m%dT%H%M%SZ}-{name}.json"


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Replace the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def table(report: Mapping[str, Any]) -> list[str]:
    """What the run gave, a line per test file and per measurement."""
    rows = []
    for entry in report["tests"]:
        counts = ", ".join(f"{entry[key]} {key}" for key in ("passed", "failed", "skipped") if entry.get(key))
        rows.append((entry["file"], entry["status"], counts or "no tests were counted"))
    for entry in report["benchmarks"]:
        for line in entry["lines"]:
            numbers = f"{_number(line.get('ours'))} {line.get('unit', '')}, peer {_number(line.get('peer'))}"
            rows.append((line["benchmark"], entry["status"], f"{numbers}, ratio {_number(line.get('ratio'))}"))
        if not entry["lines"]:
            rows.append((entry["file"], entry["status"], "no measurement"))
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    return [f"{name:{widths[0]}}  {status:{widths[1]}}  {text}" for name, status, text in rows]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def all_passed(report: Mapping[str, Any]) -> bool:
    """Whether every file that was run passed."""
    return all(entry["status"] == "passed" for key in ("tests", "benchmarks") for entry in report[key])


def run_everything(
    root: Path, python: str, machine: dict[str, Any], output: Path, only: list[str], limits: Mapping[str, float]
) -> tuple[Path, dict[str, Any]]:
    """Build, test, measure; the report and where it lies. only: stems of files, all if empty."""
    started = datetime.now(UTC)
    path = report_path(output, started, machine["device"])
    report: dict[str, Any] = {"started": started.isoformat(timespec="seconds"), "machine": machine, **commit_of(root)}
    report |= {"extension": build_extension(root, python), "missing": missing(OPTIONAL), "tests": [], "benchmarks": []}
    parts = [
        ("tests", run_tests, sorted((root / "tests" / "gpu").glob("test_*.py"))),
        ("benchmarks", run_benchmark, sorted((root / "benchmarks").glob("gpu_*.py"))),
    ]
    for key, run, files in parts:
        for file in files:
            if only and file.stem not in only:
                continue
            print(f"{file.relative_to(root)} ...", end=" ", flush=True)
            report[key].append(run(root, python, file, limits[key]))
            print(f"{report[key][-1]['status']} ({report[key][-1]['seconds']:.0f} s)", flush=True)
            write(path, report)
    write(path, report)
    return path, report


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("only", nargs="*", help="names of files to run, such as test_sampling gpu_step; default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the report")
    parser.add_argument("--test-seconds", type=float, default=TEST_SECONDS, help="limit of one test file")
    parser.add_argument("--benchmark-seconds", type=float, default=BENCHMARK_SECONDS, help="limit of one benchmark")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run, print the table last, and return the exit status."""
    options = arguments(given)
    problems = obstacles()
    if problems:
        print("\n".join(f"make gpu cannot run here: {line}" for line in problems), file=sys.stderr)
        return CANNOT_RUN
    for name in missing(OPTIONAL):
        print(f"{name} cannot be imported: {OPTIONAL[name]} is left out")
    limits = {"tests": options.test_seconds, "benchmarks": options.benchmark_seconds}
    path, report = run_everything(ROOT, sys.executable, describe_machine(), options.output, options.only, limits)
    for key in ("tests", "benchmarks"):
        for entry in report[key]:
            if "output" in entry:
                print(f"\n---- {entry['file']}: {entry['status']}\n{entry['output']}")
    print("\n".join(["", *table(report), f"\nwritten to {path}"]))
    return 0 if all_passed(report) else 1


if __name__ == "__main__":
    sys.exit(main())
