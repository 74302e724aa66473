"""Seconds from a dataset of many rows to a source of prompts, against its texts through the bare tokenizer.

A Trainer does this with its data before it starts: every row is checked and every prompt tokenised. Ours and the
tokenizer's `encode_batch` take turns; `ratio` is the tokenizer's seconds divided by ours, so at most 1. One line per
kind of dataset.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from benchmarks.workload import build_tokenizer  # noqa: E402
from hybrid_rl.data.prompts import PromptEncoder  # noqa: E402
from hybrid_rl.data.source import load_source  # noqa: E402


def rows_of(count: int, length: int) -> list[dict[str, str]]:
    """Sums of as many digits as fill `length` characters, with the column `answer`."""
    half = max((length - 2) // 2, 1)
    sides = [(str((7919 * n + 1) % 10**half), str((104729 * n + 3) % 10**half)) for n in range(count)]
    return [{"prompt": f"{a:0>{half}}+{b:0>{half}}=", "answer": str(int(a) + int(b))} for a, b in sides]


def as_list(rows: list[dict[str, str]]) -> Any:
    """As they are."""
    return rows


def as_dataset(rows: list[dict[str, str]]) -> Any:
    """The same as a `datasets.Dataset`."""
    import datasets

    return datasets.Dataset.from_list(rows)


KINDS: dict[str, Callable[[list[dict[str, str]]], Any]] = {"list": as_list, "datasets": as_dataset}


def measure(given: Namespace, kind: str) -> None:
    """One line."""
    tokenizer = build_tokenizer()
    rows = rows_of(given.rows, given.length)
    texts, dataset = [row["prompt"] for row in rows], KINDS[kind](rows)
    encoder = PromptEncoder(tokenizer, max_prompt_length=None)

    def bare() -> int:
        return sum(len(encoding.ids) for encoding in tokenizer.backend_tokenizer.encode_batch(texts))

    sides: dict[str, Callable[[], Any]] = {"ours": lambda: load_source(dataset, encoder), "peer": bare}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    cpu_seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(given.repeats + 1):
        for side, function in sides.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            function()
            if turn:
                seconds[side].append(time.perf_counter() - start)
                cpu_seconds[side].append(time.process_time() - cpu_start)
    report.print_line(
        f"rows {kind}",
        ours=float(np.median(seconds["ours"])),
        peer=float(np.median(seconds["peer"])),
        ratio=report.ratio_of_medians(seconds["peer"], seconds["ours"]),
        unit="seconds",
        hardware=report.hardware(1, {}),
        settings=report.settings(given),
        details={
            "num_tokens": bare(),
            "seconds": {side: report.spread(values) for side, values in seconds.items()},
            "cpu_seconds": {side: report.spread(values) for side, values in cpu_seconds.items()},
        },
    )


def main() -> None:
    """All lines."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--rows", type=report.positive, default=100_000)
    parser.add_argument("--length", type=report.positive, default=8, help="characters of a prompt, one token each")
    parser.add_argument("--repeats", type=report.positive, default=5)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        measure(arguments, kind)


if __name__ == "__main__":
    main()
