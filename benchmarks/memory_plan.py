"""The plan of memory against training steps on this machine, counted storage by storage: every resident, every peak.

Three shapes of a Qwen2 and six configurations, generating in place, over vLLM and on two ranks. One line of JSON for
each; `ours` is the largest deviation of a prediction in percent, the bar is 5. The details have all predictions with
what was measured. --markdown FILE also writes the peaks as a table. With --engine vllm it needs vLLM (`make vllm`).
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.support.memory.measured_memory import Measured  # noqa: E402
from tests.support.memory.memory_cases import (  # noqa: E402
    CONFIGS,
    MOST,
    PEAK,
    SAMPLE_TOKENS,
    SIZES,
    VLLM_KEYS,
    MeasuredStep,
    Row,
    compared,
    config_of,
    predicted,
    table,
)

LEAVING = {"offload": ["actor", "optimizer"]}  # of two ranks, whose engine has weights of its own


def main() -> None:
    """A line for each case."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--configs", nargs="+", choices=tuple(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--engines", nargs="+", choices=("inplace", "vllm"), default=["inplace"])
    parser.add_argument("--markdown", help="a file for the table of peaks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows_by_name = {}
    for name, size, keys in cases(arguments):
        rows = measure(size, keys)
        rows_by_name[name] = rows
        for line in table(rows):
            report.progress(f"{name:28}{line}")
        print_line(name, rows, arguments)
    if arguments.markdown is not None:
        Path(arguments.markdown).write_text("\n".join(markdown(rows_by_name)) + "\n")


def cases(given: Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Names, sizes and keys."""
    for engine in given.engines:
        own = VLLM_KEYS if engine == "vllm" else {}
        for size in given.sizes:
            for config in given.configs:
                if config != "ranks":
                    yield f"{engine} {size} {config}", size, CONFIGS[config] | own
                    continue
                least = (
                    {"engine_args.max_num_batched_tokens": SAMPLE_TOKENS} if engine == "vllm" else {}
                )  # that vLLM takes
                yield f"{engine} {size} 2 ranks", size, CONFIGS[config] | own | least
                yield f"{engine} {size} 2 ranks, offload", size, CONFIGS[config] | own | least | LEAVING


def measure(size: str, keys: dict[str, Any]) -> list[Row]:
    """Every prediction of a case; with several ranks those of the rank that is farthest off."""
    config = config_of(keys)
    planned = predicted(size, config).phases
    if config.num_ranks == 1:
        return compared(planned, MeasuredStep(size, keys).run())
    assert config.num_ranks != "auto"
    of_ranks = [compared(planned, measurement) for measurement in run_ranks(on_rank, config.num_ranks, size, keys)]
    return max(of_ranks, key=largest)


def on_rank(rank: int, num_ranks: int, size: str, keys: dict[str, Any]) -> dict[str, Measured]:
    """What a rank took."""
    from hybrid_rl.controller import RankContext, RankMesh
    from hybrid_rl.controller.ranks import object_gather

    gather = object_gather(num_ranks, timedelta(seconds=60))
    context = RankContext(rank=rank, mesh=RankMesh(dp_shard=num_ranks), device=torch.device("cpu"), gather=gather)
    return MeasuredStep(size, keys, context).run()


def largest(rows: Sequence[Row]) -> float:
    """The largest deviation."""
    return max(row.share for row in rows)


def print_line(name: str, rows: Sequence[Row], given: Namespace) -> None:
    """The line of a case."""
    predictions = [{"phase": r.phase, "what": r.what, "predicted": r.predicted, "measured": r.measured} for r in rows]
    report.print_line(
        f"memory_plan {name}",
        ours=100 * largest(rows),
        peer=None,
        ratio=None,
        unit="percent",
        hardware=report.hardware(1, {}),
        settings=report.settings(given),
        details={"bar": 100 * MOST, "bar_met": largest(rows) <= MOST, "predictions": predictions},
    )


def markdown(found: dict[str, list[Row]]) -> Iterator[str]:
    """The fullest phase of every case, and its largest deviations."""
    yield "| case | fullest phase | predicted | measured | off | residents off | peaks off | predictions |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, rows in found.items():
        peaks = [row for row in rows if row.what == PEAK]
        others = [row for row in rows if row.what != PEAK]
        fullest = max(peaks, key=lambda row: row.measured)
        yield (
            f"| {name} | {fullest.phase} | {fullest.predicted:,} | {fullest.measured:,} | "
            f"{fullest.predicted / fullest.measured - 1:+.2%} | at most {largest(others):.2%} | at most "
            f"{largest(peaks):.2%} | {len(rows)} |"
        )


if __name__ == "__main__":
    main()
