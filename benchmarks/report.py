"""Numbers of a comparison: medians with their spread, intervals, the machine, and the one line of JSON."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import psutil
import torch

# Two-sided 95 % quantiles of Student's t by degrees of freedom, 1 to 30.
T_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
NOT_REPORTED = ("trl_python", "keep")  # paths of one machine


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and number of values."""
    low, middle, high = (float(q) for q in np.quantile(values, (0.25, 0.5, 0.75)))
    return {
        "median": middle,
        "quartile_1": low,
        "quartile_3": high,
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def ratio_of_medians(peer: Sequence[float], ours: Sequence[float]) -> float:
    """Median of the peer's seconds by the median of ours: above 1, we are faster."""
    return median(peer) / median(ours)


def t_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean with its 95 % interval by Student's t; the ends are None for a single value."""
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": None, "high": None, "count": len(values)}
    degrees = len(values) - 1
    # Beyond the table: first term of the Cornish-Fisher expansion around the normal quantile.
    quantile = T_95[degrees - 1] if degrees <= len(T_95) else 1.95996 + (1.95996**3 + 1.95996) / (4 * degrees)
    half = quantile * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "count": len(values)}


def reached_at(values: Sequence[float], positions: Sequence[float], goal: float) -> float | None:
    """The first position (seconds, samples) whose value is at least the goal; None if there is none."""
    return next((position for value, position in zip(values, positions, strict=True) if value >= goal), None)


def value_at(values: Sequence[float], positions: Sequence[float], position: float, before: float) -> float:
    """The last value seen at a position of increasing `positions`; `before` if nothing was seen yet."""
    seen = [value for value, place in zip(values, positions, strict=True) if place <= position]
    return seen[-1] if seen else before


def hardware(threads: int, versions: dict[str, str]) -> dict[str, Any]:
    """The machine and the versions that ran on it. versions: of the peer, by package."""
    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        **{name if name not in ("torch", "transformers") else f"peer_{name}": v for name, v in versions.items()},
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def settings(arguments: Namespace, **more: Any) -> dict[str, Any]:
    """The arguments of the script."""
    kept = {name: value for name, value in vars(arguments).items() if name not in NOT_REPORTED}
    return {**kept, **more, "command": command(sys.argv)}


def command(argv: Sequence[str]) -> str:
    """The command line, without arguments that are paths of this machine."""
    hidden = {f"--{name.replace('_', '-')}" for name in NOT_REPORTED}
    kept, skip = [], False
    for argument in argv[1:]:
        if not skip and argument.partition("=")[0] not in hidden:
            kept.append(argument)
        skip = argument in hidden
    return " ".join(["python", f"benchmarks/{Path(argv[0]).name}", *kept])


def print_line(
    benchmark: str,
    *,
    ours: float | None,
    peer: float | None,
    ratio: float | None,
    unit: str,
    hardware: dict[str, Any],
    settings: dict[str, Any],
    details: dict[str, Any],
) -> None:
    """Print one line of JSON. ratio: above 1, we are better; None if the peer could not run."""
    record = {
        "benchmark": benchmark,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "unit": unit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "settings": settings,
        "details": details,
    }
    print(json.dumps(_rounded(record)), flush=True)


def _rounded(value: Any) -> Any:
    """Round to five digits, more than any of these measurements has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def progress(text: str) -> None:
    """A line for the person who waits."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} must be at least 1")
    return value


def parser_of(doc: str | None) -> ArgumentParser:
    """A parser that shows the docstring of its script, with the arguments that all scripts have."""
    parser = ArgumentParser(description=(doc or "").partition("\n\n")[0])
    parser.add_argument("--threads", type=positive, nargs="+", default=[1], help="one line per number of threads")
    parser.add_argument("--seed", type=int, default=0)
    return parser
