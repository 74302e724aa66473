"""Cost of planning a handoff, and the bytes that the plan moves, per rank, against gathering full tensors.

Single ranks of models of many billions of parameters on 8 to 1024 ranks are planned on one core, from traces of vLLM's
loaders (benchmarks/layouts, bf16) and FSDP2's placement of the trainer's tensors (fp32). Nothing is allocated or sent.
Prints a table to stderr and one line of JSON per case.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from hybrid_rl.extras.plan.trace_files import load_trace  # noqa: E402
from hybrid_rl.extras.plan.traffic import fsdp_layout, gathered, report_of  # noqa: E402
from hybrid_rl.resharding.rank_plan import make_plan  # noqa: E402
from hybrid_rl.resharding.trace import Trace  # noqa: E402

LAYOUTS = Path(__file__).parent / "layouts"
SOURCE, ENGINE = torch.float32, torch.bfloat16
RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Case:
    """A model on so many ranks, in groups that each hold everything; tp: tensor parallel ranks of an engine."""

    model: str
    tp: int
    num_ranks: int
    replicas: int = 1

    def trace(self, rank: int) -> Trace:
        """The trace of a rank's engine. Only those of the first and the last tensor-parallel rank are kept."""
        return load_trace(LAYOUTS / f"{self.model}-tp{self.tp}-rank{rank % self.tp}.npz")

    def ranks(self, count: int) -> list[int]:
        """So many ranks to plan, each the first or the last of its engine, spread over all engines."""
        engines = np.linspace(0, self.num_ranks // self.tp - 1, count).astype(int).tolist()
        return [engine * self.tp + (self.tp - 1) * (number % 2) for number, engine in enumerate(engines)]


CASES = (
    Case("qwen2.5-7b", 1, 8),
    Case("qwen2.5-7b", 2, 8),
    Case("qwen2.5-72b", 8, 64),
    Case("qwen3-30b-a3b", 1, 64),
    Case("qwen3-30b-a3b", 4, 8),
    Case("qwen3-30b-a3b", 4, 64),
    Case("qwen3-30b-a3b", 4, 64, replicas=8),
    Case("qwen3-30b-a3b", 8, 64),
    Case("deepseek-v3", 8, 256),
    Case("deepseek-v3", 8, 1024),
    Case("deepseek-v3", 8, 1024, replicas=8),
)


def measure(case: Case, given: Namespace) -> dict[str, Any]:
    """Plans of some ranks: seconds, and the means of their bytes."""
    hosts = [f"host{rank // RANKS_PER_HOST}" for rank in range(case.num_ranks)]
    sources = case.trace(0).sources
    begin = time.perf_counter()
    layout = fsdp_layout(sources, case.num_ranks, replicas=case.replicas, hosts=hosts)
    layout_seconds = time.perf_counter() - begin
    seconds, cpu_seconds, reports, received = [], [], [], []
    for rank in case.ranks(given.repeats):
        trace = case.trace(rank)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        plan = make_plan(trace, layout, rank)
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu_begin)
        reports.append(report_of(plan, trace, layout))
        received.append(gathered(layout, rank))
    written = fmean(rank_report.total.written_bytes for rank_report in reports)
    num_elements = sum(spec.num_bytes // spec.dtype.itemsize for spec in sources)
    return {
        "model": case.model,
        "parameters": num_elements,
        "ranks": case.num_ranks,
        "replicas": case.replicas,
        "tensor_parallel": case.tp,
        "plan_seconds": report.spread(seconds),
        "plan_cpu_seconds": report.spread(cpu_seconds),
        "layout_seconds": layout_seconds,
        "num_copies": len(trace.copies),
        "num_pieces": max(rank_report.num_pieces for rank_report in reports),
        "num_buckets": max(rank_report.num_buckets for rank_report in reports),
        # A rank reads its own part and its host's parts in place; parts from other hosts are cast before sending.
        "local_read_bytes": fmean(rank_report.local.read_bytes for rank_report in reports),
        "host_read_bytes": fmean(rank_report.host.read_bytes for rank_report in reports),
        "remote_sent_bytes": fmean(rank_report.remote.written_bytes for rank_report in reports),
        "written_bytes": written,
        "minimum_written_bytes": fmean(rank_report.minimum.written_bytes for rank_report in reports),
        "staging_bytes": max(rank_report.staging_bytes for rank_report in reports),
        "gather_host_bytes": fmean(links["host"].read_bytes for links in received),
        "gather_remote_bytes": fmean(links["remote"].read_bytes for links in received),
        # Every tensor in full in the trainer's dtype, again in the engine's, and the rank's share by load_weights.
        "gather_written_bytes": num_elements * (SOURCE.itemsize + ENGINE.itemsize) + written,
        "gather_staging_bytes": max(spec.num_bytes for spec in sources) * (1 + ENGINE.itemsize / SOURCE.itemsize),
    }


def show(found: list[dict[str, Any]]) -> None:
    """The table, in GB per rank."""
    columns = {
        "local": "local_read_bytes",
        "host": "host_read_bytes",
        "remote": "remote_sent_bytes",
        "written": "written_bytes",
        "gather: host": "gather_host_bytes",
        "remote ": "gather_remote_bytes",
        "written ": "gather_written_bytes",
    }
    table = Table("model", "tp", "ranks", "replicas", "plan, s", "CPU s", "pieces", *columns, title="GB per rank")
    for line in found:
        table.add_row(
            line["model"],
            *(str(line[key]) for key in ("tensor_parallel", "ranks", "replicas")),
            *(f"{line[key]['median']:.2f}" for key in ("plan_seconds", "plan_cpu_seconds")),
            str(line["num_pieces"]),
            *(f"{line[key] / 1e9:.2f}" for key in columns.values()),
        )
    Console(stderr=True, width=150).print(table)


def main() -> None:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=sorted({case.model for case in CASES}), help="which models")
    parser.add_argument("--repeats", type=report.positive, default=5, help="ranks that are planned")
    arguments = parser.parse_args()
    lines = []
    for case in CASES:
        if case.model not in arguments.models:
            continue
        report.progress(f"{case.model}, tensor parallel {case.tp}, {case.num_ranks} ranks")
        line = measure(case, arguments)
        lines.append(line)
        report.print_line(
            "plan",
            ours=line["written_bytes"],
            peer=line["gather_written_bytes"],
            ratio=line["gather_written_bytes"] / line["written_bytes"],
            unit="bytes written per rank",
            hardware=report.hardware(1, {}),
            settings=report.settings(arguments),
            details=line,
        )
    show(lines)


if __name__ == "__main__":
    main()
