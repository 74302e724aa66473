"""Metrics as curves of bounded length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_rl.extras.report.run_files import is_number

MAX_POINTS = 1000
DIGITS = 8


def curves(records: Sequence[Mapping[str, Any]], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return every metric of a run: `axes`, lists of steps, and `metrics`, the number of its axis and its values by
    name. A metric of more than max_points steps is cut into that many stretches of equal length, of which each is drawn
    at its last step as its mean, or as its extreme if the metric is a largest or smallest value itself."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and is_number(value):
                steps, values = series.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(float(value))
    axes: dict[tuple[int, ...], int] = {}
    metrics: dict[str, list[Any]] = {}
    for name in sorted(series):
        steps, values = thinned(*series[name], combined_by(name), max_points)
        metrics[name] = [axes.setdefault(tuple(steps), len(axes)), [rounded(value) for value in values]]
    return {"axes": [list(axis) for axis in axes], "metrics": metrics}


def rounded(value: float) -> float:
    """Return a number with as many digits as a picture can show."""
    return float(f"{value:.{DIGITS}g}")


def combined_by(name: str) -> Callable[[Sequence[float]], float]:
    """Return how neighbouring values of a metric become one."""
    last = name.replace("/", "_").split("_")[-1]
    return {"max": max, "min": min}.get(last) or (
        min if "min_length" in name else max if "max_length" in name else mean
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean of some numbers."""
    return math.fsum(values) / len(values)


def thinned(
    steps: Sequence[int], values: Sequence[float], combine: Callable[[Sequence[float]], float], max_points: int
) -> tuple[list[int], list[float]]:
    """Return at most max_points points of a curve: the last step of each stretch, and its values combined."""
    bounds = stretches(len(steps), max_points)
    return [steps[end - 1] for _, end in bounds], [combine(values[start:end]) for start, end in bounds]


def stretches(number: int, max_points: int) -> list[tuple[int, int]]:
    """Cut range(number) into at most max_points stretches of lengths that differ by one at most."""
    parts = min(number, max_points)
    return [(place * number // parts, (place + 1) * number // parts) for place in range(parts)]
