"""`make gpu`: csrc, the tests of this folder and the benchmarks benchmarks/gpu_*.py on a CUDA machine, into one file.

Needs no network and installs nothing: it takes the Python that runs it, says what is missing there, builds csrc in
place, runs each part in a process of its own with a time limit, and writes what it has after every one, so that nothing
that fails, hangs or is cut off hides the rest. What breaks most comes first: the build, then a smoke stage of some two
minutes, then tests and benchmarks by risk.

With --budget SECONDS it starts nothing that cannot end in time and says what was not run; --resume REPORT goes on from
there, in the same report.

Exit status: 0, all passed; 1, something failed or ran out of time; 3, this machine cannot run it; 4, what ran passed,
but not everything was run.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a script is started with its own folder on the path

from tests.gpu import machine  # noqa: E402
from tests.gpu.machine import Outcome, child_environment, run_limited  # noqa: E402
from tests.gpu.parts import BENCHMARKS, BUILD, Part, parts_of, piece_of  # noqa: E402

FAILED, CANNOT_RUN, INCOMPLETE = 1, 3, 4
NOT_RUN = "not run"
TAIL_LINES = {"passed": 8, "failed": 60, "timeout": 60}  # of the output, by status
LIBRARIES = ("_native.so", "_native_cuda.so", "_cuda_region.so")
MARGIN_SECONDS = 5.0  # of a budget: to kill what hangs, to write and to print


def run_part(root: Path, python: str, part: Part, limit_seconds: float) -> dict[str, Any]:
    """One part in a process of its own; its entry in the report."""
    if part.stage == BUILD:
        outcome, found = _build(root, python, part, limit_seconds)
    elif part.stage == BENCHMARKS:
        outcome, found = _benchmark(root, python, part, limit_seconds)
    else:
        outcome, found = _tests(root, python, part, limit_seconds)
    entry: dict[str, Any] = {"name": part.name, "stage": part.stage, "status": outcome.status}
    entry |= {"seconds": round(outcome.seconds, 1), "peak_memory_bytes": outcome.peak_bytes}
    return entry | found | {"output": tail(outcome.output, TAIL_LINES[outcome.status])}


def _build(root: Path, python: str, part: Part, limit_seconds: float) -> tuple[Outcome, dict[str, Any]]:
    """Compile csrc in place. All libraries must be there: else the rest would test and measure stand-ins."""
    if "setuptools" in machine.missing(["setuptools"]):
        return Outcome("failed", 0.0, "setuptools cannot be imported; install it"), {}
    for name in LIBRARIES:
        (root / "hybrid_rl" / name).unlink(missing_ok=True)
    outcome = run_limited([python, part.file, "build_ext", "--inplace"], root, limit_seconds, child_environment(root))
    absent = [name for name in LIBRARIES if not (root / "hybrid_rl" / name).exists()]
    if outcome.status == "passed" and absent:
        text = f"{outcome.output}\nnot built: {', '.join(absent)}; nvcc must be on the path or in CUDA_HOME"
        outcome = Outcome("failed", outcome.seconds, text)
    return outcome, {"missing_libraries": absent} if absent else {}


def _tests(root: Path, python: str, part: Part, limit_seconds: float) -> tuple[Outcome, dict[str, Any]]:
    """Tests by pytest: counts, names of failures, reasons of skips, the most that PyTorch's allocator held."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [python, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", f"--junitxml={junit}"]
        outcome = run_limited([*command, part.file, *part.arguments], root, limit_seconds, child_environment(root))
        counts = count_tests(junit.read_text()) if junit.exists() else {}
    if outcome.status == "passed" and not counts.get("passed"):
        reasons = "; ".join(counts.get("skip_reasons", ())) or "no test was counted"
        outcome = Outcome("failed", outcome.seconds, f"{outcome.output}\nno test ran: {reasons}", outcome.peak_bytes)
    return outcome, counts


def _benchmark(root: Path, python: str, part: Part, limit_seconds: float) -> tuple[Outcome, dict[str, Any]]:
    """A benchmark: every line of JSON that it printed."""
    command = [python, part.file, *part.arguments]
    outcome = run_limited(command, root, limit_seconds, child_environment(root))
    lines = benchmark_lines(outcome.output)
    if outcome.status == "passed" and not lines:
        outcome = Outcome("failed", outcome.seconds, f"{outcome.output}\nnothing was measured", outcome.peak_bytes)
    talk = "\n".join(line for line in outcome.output.splitlines() if not line.startswith('{"benchmark"'))
    return Outcome(outcome.status, outcome.seconds, talk, outcome.peak_bytes), {"lines": lines}


def count_tests(junit: str) -> dict[str, Any]:
    """passed, failed and skipped of pytest's JUnit report, names of what failed, reasons of skips, bytes of tensors."""
    tree = ElementTree.fromstring(junit)
    cases = list(tree.iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [found for c in cases if (found := c.find("skipped")) is not None]
    counts: dict[str, Any] = {"passed": len(cases) - len(failed) - len(skipped), "failed": len(failed)}
    counts["skipped"] = len(skipped)
    if failed:
        counts["failures"] = [str(c.get("name")) for c in failed]
    if skipped:
        counts["skip_reasons"] = sorted({str(s.get("message")) for s in skipped})
    for item in tree.iter("property"):
        if item.get("name") == "peak_tensor_bytes":
            counts["peak_tensor_bytes"] = int(str(item.get("value")))
    return counts


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


# ---------------------------------------------------------------------------------------------------------- report


def new_report(described: Mapping[str, Any]) -> dict[str, Any]:
    """A report without entries."""
    return {"machine": dict(described), "missing": machine.missing(machine.OPTIONAL), "runs": [], "parts": []}


def read_report(path: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """The report of an earlier run, to go on with. Raises ValueError if it is none, or of another device."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        device = report["machine"]["device"]
        unknown = {str(entry["status"]) for entry in report["parts"]} - {*TAIL_LINES, NOT_RUN}
        if unknown or not all(isinstance(report[key], list) for key in ("runs", "missing", "parts")):
            raise ValueError(f"statuses {sorted(unknown)}" if unknown else "runs, missing and parts are no lists")
        for entry in report["parts"]:
            entry["name"], entry["stage"], entry["why" if entry["status"] == NOT_RUN else "output"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--resume {path}: no report of make gpu ({type(error).__name__}: {error})") from None
    if device != described["device"]:
        raise ValueError(
            f"--resume {path}: that report is of {device}, this machine has {described['device']}; start a new one"
        )
    return report


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
    """What the run gave, a line per part and per measurement."""
    rows = []
    for entry in report["parts"]:
        if entry["status"] == NOT_RUN:
            rows.append((entry["name"], NOT_RUN, entry["why"]))
        elif entry["stage"] == BENCHMARKS:
            for line in entry["lines"]:
                numbers = f"{_number(line.get('ours'))} {line.get('unit', '')}, peer {_number(line.get('peer'))}"
                rows.append((line["benchmark"], entry["status"], f"{numbers}, ratio {_number(line.get('ratio'))}"))
            if not entry["lines"]:
                rows.append((entry["name"], entry["status"], "no measurement"))
        else:
            counts = ", ".join(f"{entry[key]} {key}" for key in ("passed", "failed", "skipped") if entry.get(key))
            rows.append((entry["name"], entry["status"], counts or f"{entry['seconds']:.0f} s"))
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    return [f"{name:{widths[0]}}  {status:{widths[1]}}  {text}" for name, status, text in rows]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def exit_status(report: Mapping[str, Any]) -> int:
    """What the process ends with."""
    statuses = {entry["status"] for entry in report["parts"]}
    if statuses & {"failed", "timeout"}:
        return FAILED
    return INCOMPLETE if NOT_RUN in statuses else 0


# ------------------------------------------------------------------------------------------------------------- run


def in_turn(parts: Sequence[Part], report: Mapping[str, Any]) -> list[Part]:
    """What is left to do of the parts: the build, then what was not run, then what failed, then what hung."""
    before = {entry["name"]: entry["status"] for entry in report["parts"]}
    turns = [NOT_RUN, "failed", "timeout"]
    left = [part for part in parts if part.stage == BUILD or before.get(part.name, NOT_RUN) in turns]
    return sorted(left, key=lambda part: (part.stage != BUILD, turns.index(_status(before, part))))


def _status(before: Mapping[str, str], part: Part) -> str:
    status = before.get(part.name, NOT_RUN)
    return NOT_RUN if status == "passed" else status


def run_parts(
    root: Path, python: str, parts: Sequence[Part], report: dict[str, Any], path: Path, budget_seconds: float | None
) -> None:
    """Run what is left of the parts, the report written after each of them.

    budget_seconds: nothing is started that is not expected to end by then, and nothing outlives it.
    """
    start = time.monotonic()
    run = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "budget_seconds": budget_seconds}
    report["runs"].append(run | machine.commit_of(root))
    entries = {entry["name"]: entry for entry in report["parts"]}
    todo = in_turn(parts, report)
    for part in todo:
        why = "its turn did not come: the run was cut off"
        entries.setdefault(part.name, {"name": part.name, "stage": part.stage, "status": NOT_RUN, "why": why})
    order = {part.name: index for index, part in enumerate(parts)}

    def save() -> None:
        report["runs"][-1]["seconds"] = round(time.monotonic() - start, 1)
        report["parts"] = sorted(entries.values(), key=lambda entry: order.get(entry["name"], len(order)))
        write(path, report)

    def obstacle(part: Part, left: float) -> str:
        if part.stage != BUILD and entries.get(BUILD, {}).get("run") != len(report["runs"]) - 1:
            return "csrc was not built in this run"  # what an earlier one built may be something else
        return f"needs some {part.seconds:.0f} s, {max(0.0, left):.0f} s were left" if part.seconds > left else ""

    save()
    for part in todo:
        left = float("inf") if budget_seconds is None else budget_seconds - MARGIN_SECONDS - (time.monotonic() - start)
        if why := obstacle(part, left):
            entries[part.name] |= {"why": why} if entries[part.name]["status"] == NOT_RUN else {}
            continue
        print(f"{part.name} ...", end=" ", flush=True)
        entry = run_part(root, python, part, min(part.limit_seconds, left))
        entries[part.name] = entry | {"run": len(report["runs"]) - 1}
        print(f"{entry['status']} ({entry['seconds']:.0f} s)", flush=True)
        save()
    save()


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "only", nargs="*", help="stages (smoke, tests, benchmarks), parts or files, such as test_sampling gpu_step"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of the whole run; default: none")
    parser.add_argument("--resume", type=Path, metavar="REPORT", help="go on with this report, and in it")
    parser.add_argument("--part", metavar="K/N", help="the K-th of N pieces that take about equally long")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the report")
    parser.add_argument("--list", action="store_true", help="show the parts and what each should take, and end")
    return parser.parse_args(given)


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """The parts that the command line asks for. Raises ValueError for what it cannot mean."""
    parts = parts_of(ROOT, options.only)
    if options.budget is not None and not options.budget > 0:
        raise ValueError(f"--budget {options.budget:g}: give a number of seconds above 0")
    if options.part is None:
        return parts
    found = re.fullmatch(r"(\d+)/(\d+)", options.part)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--part {options.part}: give K/N with K from 1 to N, such as 1/3")
    return piece_of(parts, int(found[1]), int(found[2]))


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the table last, and return the exit status."""
    options = arguments(given)
    try:
        parts = chosen_parts(options)
    except ValueError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return CANNOT_RUN
    if options.list:
        print("\n".join(f"{part.name:28} {part.seconds:5.0f} s  {part.file}" for part in parts))
        return 0
    if problems := machine.obstacles():
        print("\n".join(f"make gpu cannot run here: {line}" for line in problems), file=sys.stderr)
        return CANNOT_RUN
    described = machine.describe_machine()
    try:
        report = new_report(described) if options.resume is None else read_report(options.resume, described)
    except ValueError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return CANNOT_RUN
    for name in report["missing"]:
        print(f"{name} cannot be imported: {machine.OPTIONAL.get(name, 'what needs it')} is left out")
    path = options.resume or report_path(options.output, datetime.now(UTC), described["device"])
    try:
        write(path, report)
    except OSError as error:
        print(
            f"make gpu: the report cannot be written to {path} ({error}); name a folder with --output", file=sys.stderr
        )
        return CANNOT_RUN
    signal.signal(signal.SIGTERM, end)  # a part that is running is then killed as after a Ctrl-C
    run_parts(ROOT, sys.executable, parts, report, path, options.budget)
    for entry in report["parts"]:
        if entry["status"] in ("failed", "timeout"):
            print(f"\n---- {entry['name']}: {entry['status']}\n{entry['output']}")
    print("\n".join(["", *table(report), f"\nwritten to {path}"]))
    if any(entry["status"] == NOT_RUN for entry in report["parts"]):
        print(f"not everything was run; go on with --resume {path}")
    return exit_status(report)


def end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
