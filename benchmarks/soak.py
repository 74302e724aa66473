"""A long run of agents under random faults, beside the same run without: does it learn as well, and does anything grow?

Reward functions raise, hang and lose their processes, so do tools; handoffs fail, ranks and the driver are killed, and
the disk is full for a while. Steps of faults are drawn from the seed. A run that ends is started again, as a supervisor
would. Prints a table, and one line of JSON; the exit status is 1 if something did not hold.

`make soak ARGS="--steps 100 --engine vllm"`. The full disk takes a tmpfs, which root can mount.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.soak_faults import EVERY, FILLER, draw_schedule  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("without faults", "with faults")
DISK_BYTES, DISK_BYTES_PER_STEP = 64 << 20, 256 << 10  # of checkpoints, and of the records of a step
STALLED_SECONDS = 600.0  # without a step, a run counts as hung
FREED_SECONDS = 60.0  # without a step, somebody frees a full disk: a restart waits for that
MOST_STARTS = 30
WARM_SHARE = 0.2  # of the steps, in which memory may grow
LAST_SHARE = 0.2  # of the steps, whose rewards are compared
REWARD_TOLERANCE = 0.1
GROWTH_LIMIT = 0.1  # of the median, over all steps
# What must not grow. The machine's available memory is reported, but others use it too.
HELD = ("process_bytes", "num_threads", "num_descriptors", "num_processes", "num_files")
GAP = "sampling/sampling_logp_difference/max"
GAP_LIMIT = 1e-4


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--steps", type=report.positive, default=500)
    parser.add_argument("--engine", choices=("inplace", "vllm"), default="inplace")
    parser.add_argument("--ranks", type=report.positive, default=2, help="on Ray; 1 = in the driver, no rank is killed")
    parser.add_argument("--faults", nargs="+", choices=list(EVERY), default=list(EVERY), metavar="KIND")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which is kept")
    return parser.parse_args(argv)


def main() -> int:
    """Run both sides, and report."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="soak", dir="/tmp") as name:
        root = options.keep or Path(name)
        root.mkdir(parents=True, exist_ok=True)
        kinds = [kind for kind in options.faults if not (kind == "rank killed" and options.ranks == 1)]
        sides = {}
        for side in SIDES:
            folder = root / side.replace(" ", "-")
            (folder / "claims").mkdir(parents=True)
            with small_disk(folder / "disk", DISK_BYTES + options.steps * DISK_BYTES_PER_STEP) as is_small:
                here = [kind for kind in kinds if kind != "disk full" or is_small] if side == SIDES[1] else []
                sides[side] = run_side(options, folder, here)
        skipped = sorted(set(EVERY) - set(here))
    problems = problems_of(sides, options.steps)
    Console(stderr=True, width=120).print(table(sides), *(f"skipped: {kind}" for kind in skipped), *problems, sep="\n")
    details = {side: summary(results, options.steps) for side, results in sides.items()}
    rewards = [details[side]["reward"]["mean"] for side in reversed(SIDES)]
    report.print_line(
        "soak",
        ours=rewards[0],
        peer=rewards[1],
        ratio=rewards[0] / rewards[1] if rewards[1] else None,
        unit="mean reward of the last steps, with faults and without",
        hardware=report.hardware(1, {}),
        settings=report.settings(options),
        details={**details, "skipped": skipped, "problems": problems},
    )
    return 1 if problems else 0


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[bool]:
    """Mount a disk that can be filled, or make a plain folder if that is not allowed. Gives whether it can be."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    is_small = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mount") is not None
    is_small = is_small and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield is_small
    finally:
        if is_small:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_side(given: Namespace, folder: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Run to the last step, from the newest checkpoint each time that the driver has ended. Returns what it wrote."""
    options = {name: getattr(given, name) for name in ("steps", "engine", "ranks", "seed")}
    (folder / "options.json").write_text(json.dumps({**options, "every": max(1, given.steps // 100)}))
    schedule = draw_schedule(given.steps, given.seed, kinds) if kinds else {}
    (folder / "schedule.json").write_text(json.dumps(schedule))
    statuses: list[int] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:  # paths of sockets may not be long
        while (not statuses or statuses[-1]) and len(statuses) < MOST_STARTS:
            before = len(lines(folder / "record.jsonl"))
            statuses.append(start(folder, Path(short)))
            report.progress(f"{folder.name}: status {statuses[-1]} after {time.monotonic() - begun:.0f} s")
            stuck = len(statuses) > 1 and len(lines(folder / "record.jsonl")) == before
            if statuses[-1] and stuck:
                report.progress((folder / "output.txt").read_text()[-4000:])
                break
    names = ("record", "faults", "warnings")
    written = {name: lines(folder / f"{name}.jsonl") for name in names}
    return {**written, "schedule": schedule, "statuses": statuses, "seconds": time.monotonic() - begun}


def start(folder: Path, temporary: Path) -> int:
    """Start the driver once, and return the status with which it ended; kill it if it makes no steps."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "benchmarks.soak_run", str(folder)]
    filler = folder / "disk" / FILLER
    filler.unlink(missing_ok=True)
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        num_lines, changed = -1, time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.2)
                number = len(lines(folder / "record.jsonl"))
                if number != num_lines:
                    num_lines, changed = number, time.monotonic()
                if time.monotonic() - changed > FREED_SECONDS:
                    filler.unlink(missing_ok=True)
                if time.monotonic() - changed > STALLED_SECONDS:
                    report.progress(f"{folder.name}: no step for {STALLED_SECONDS:.0f} s")
                    process.kill()
        finally:
            process.kill()
            process.wait()
    return process.returncode


def lines(path: Path) -> list[Any]:
    """The lines of a file; a last one that is not whole does not count."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def slope(values: Sequence[float]) -> float:
    """The median slope of all pairs, per value: a jump does not count as growth."""
    pairs = combinations(range(len(values)), 2)
    return statistics.median((values[b] - values[a]) / (b - a) for a, b in pairs) if len(values) > 1 else 0.0


def last_of_each_step(record: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a run, each step as it was trained last."""
    return list({line["step"]: line for line in sorted(record, key=lambda line: line["at"])}.values())


def growth(record: Sequence[dict[str, Any]], name: str, num_steps: int) -> dict[str, float]:
    """The median of a number, its slope per step, and what that makes over all steps, as a share of the median."""
    points = [(line["step"], line[name]) for line in last_of_each_step(record) if name in line]
    points = sorted(points)[int(WARM_SHARE * len(points)) :]
    if len(points) < 2 or points[-1][0] == points[0][0]:
        return {"median": points[0][1] if points else 0.0, "per_step": 0.0, "share": 0.0}
    middle = statistics.median(value for _, value in points)
    per_step = slope([value for _, value in points]) * (len(points) - 1) / (points[-1][0] - points[0][0])
    return {"median": middle, "per_step": per_step, "share": per_step * num_steps / middle if middle else 0.0}


def last_rewards(record: Sequence[dict[str, Any]], num_steps: int) -> list[float]:
    """Of the last steps."""
    begin = num_steps - max(2, int(LAST_SHARE * num_steps))
    return [line["reward"] for line in last_of_each_step(record) if line["step"] > begin]


def summary(side: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """What a side comes to."""
    record = side["record"]
    rewards = last_rewards(record, num_steps)
    return {
        "reward": report.t_interval(rewards) if rewards else {"mean": 0.0, "count": 0},
        "held": {name: growth(record, name, num_steps) for name in (*HELD, "available_bytes")},
        "faults": faults(side),
        "steps_trained": len(record),
        "starts": len(side["statuses"]),
        "restarts": num_restarts(record),
        "samples_without_reward": sum(line.get("rewards/num_failed", 0.0) for line in record),
        "rewards_retried": sum(line.get("rewards/num_retried", 0.0) for line in record),
        "tool_timeouts": sum(line.get("agents/tool_timeouts", 0.0) for line in record),
        "largest_gap": max((line[GAP] for line in record if GAP in line), default=None),
        "warnings": Counter(without_folders(text)[:60] for text in side["warnings"]).most_common(12),
        "seconds": side["seconds"],
        "median_step_seconds": statistics.median(line["step_time"] for line in record) if record else None,
    }


def without_folders(text: str) -> str:
    """A text with the last part of each path only."""
    return re.sub(r"/[^\s:]*/", "", text)


def num_restarts(record: Sequence[dict[str, Any]]) -> float:
    """Restarts by the library, over all drivers, each of which counts its own."""
    most: dict[int, float] = {}
    for line in record:
        most[line["driver"]] = max(most.get(line["driver"], 0.0), line.get("restarts", 0.0))
    return sum(most.values())


def faults(side: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Of each kind: how many were drawn, how many happened, and how many the run itself has counted or told."""
    drawn = Counter(side["schedule"].values())
    happened = Counter(kind for kind, _ in {(fault["kind"], fault["step"]) for fault in side["faults"]})
    return {
        kind: {"drawn": drawn[kind], "happened": happened[kind], "seen": num_seen(side, kind)} for kind in sorted(drawn)
    }


def num_seen(side: dict[str, Any], kind: str) -> int:
    """In how many steps of such faults the metrics, warnings or statuses of the run tell of one."""
    happened = {fault["step"] for fault in side["faults"] if fault["kind"] == kind}

    def steps(*metrics: str) -> int:
        seen_steps = {line["step"] for line in side["record"] if any(line.get(name, 0.0) for name in metrics)}
        return len(seen_steps & happened)

    if kind.startswith("reward"):
        return steps("rewards/num_failed", "rewards/num_retried")
    if kind.startswith("tool"):
        return steps("tools/failure_frequency", "agents/tool_timeouts")
    if kind == "driver killed":
        return sum(status == -9 for status in side["statuses"])
    words = {"handoff": "asked to fail", "rank killed": "process ended", "disk full": "No space left"}[kind]
    return min(len(happened), sum(words in text for text in side["warnings"]))


def problems_of(found: dict[str, dict[str, Any]], num_steps: int) -> list[str]:
    """What did not hold, in words."""
    problems = []
    for name, side in found.items():
        done = {line["step"] for line in side["record"]}
        if side["statuses"][-1] != 0 or done != set(range(1, num_steps + 1)):
            problems.append(
                f"{name}: it did not end well: statuses {side['statuses']}, {len(done)} of {num_steps} steps"
            )
            continue
        for kind, numbers in faults(side).items():
            if not numbers["drawn"] == numbers["happened"] == numbers["seen"]:
                problems.append(f"{name}: {kind}: {numbers}")
        for held in HELD:
            share = growth(side["record"], held, num_steps)["share"]
            if share > GROWTH_LIMIT:
                problems.append(f"{name}: {held} grows by {share:.0%} of its median over the run")
        gap = max((line[GAP] for line in side["record"] if GAP in line), default=0.0)
        if gap > GAP_LIMIT:
            problems.append(f"{name}: logprobs of engine and trainer differ by {gap:.1e}")
    rewards = [last_rewards(found[side]["record"], num_steps) for side in SIDES]
    if all(len(series) > 1 for series in rewards):
        plain, faulty = (report.t_interval(series) for series in rewards)
        lowest = (plain["low"] or 0.0) - REWARD_TOLERANCE
        if (faulty["high"] or 0.0) < lowest:
            problems.append(f"with faults the reward ends at {faulty['mean']:.3f}, without at {plain['mean']:.3f}")
    return problems


def table(found: dict[str, dict[str, Any]]) -> Table:
    """Both sides, and what became of the faults."""
    shown = Table("", *SIDES, box=None)
    steps = max((line["step"] for side in found.values() for line in side["record"]), default=0)
    both = [summary(found[side], steps) for side in SIDES]
    for name in ("steps_trained", "starts", "restarts", "samples_without_reward", "rewards_retried", "tool_timeouts"):
        shown.add_row(name, *(f"{outcome[name]:.0f}" for outcome in both))
    shown.add_row("reward at the end", *(f"{outcome['reward']['mean']:.3f}" for outcome in both))
    shown.add_row("seconds", *(f"{outcome['seconds']:.0f}" for outcome in both))
    for name in (*HELD, "available_bytes"):
        grown = (outcome["held"][name] for outcome in both)
        shown.add_row(name, *(f"{trend['median']:,.0f} ({trend['per_step']:+,.2f} per step)" for trend in grown))
    for kind, numbers in both[1]["faults"].items():
        shown.add_row(kind, "", ", ".join(f"{number} {word}" for word, number in numbers.items()))
    return shown


if __name__ == "__main__":
    sys.exit(main())
