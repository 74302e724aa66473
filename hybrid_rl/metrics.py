"""Numbers of a training step: sums that may be joined over micro-batches and ranks, and one way to take time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class MetricSums:
    """Weighted means, totals, minima and maxima that join exactly, however the batch was cut."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._totals: dict[str, float] = {}
        self._lows: dict[str, float] = {}
        self._highs: dict[str, float] = {}

    def mean(self, name: str, total: float, count: float) -> None:
        """Add `total` over `count` items to a mean."""
        before = self._means.get(name, (0.0, 0.0))
        self._means[name] = (before[0] + total, before[1] + count)

    def parts(self, name: str) -> tuple[float, float]:
        """Sum and count behind a mean; zeros where nothing was added."""
        return self._means.get(name, (0.0, 0.0))

    def total(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._totals[name] = self._totals.get(name, 0.0) + value

    def low(self, name: str, value: float) -> None:
        """Keep the smallest value; NaN is left out."""
        if not math.isnan(value):
            self._lows[name] = min(value, self._lows.get(name, math.inf))

    def high(self, name: str, value: float) -> None:
        """Keep the largest value; NaN is left out."""
        if not math.isnan(value):
            self._highs[name] = max(value, self._highs.get(name, -math.inf))

    def merge(self, other: MetricSums) -> None:
        """Add everything another holds."""
        for name, (total, count) in other._means.items():
            self.mean(name, total, count)
        for name, value in other._totals.items():
            self.total(name, value)
        for name, value in other._lows.items():
            self.low(name, value)
        for name, value in other._highs.items():
            self.high(name, value)

    def result(self) -> dict[str, float]:
        """All metrics; a mean over nothing is left out."""
        means = {name: total / count for name, (total, count) in self._means.items() if count}
        return {**means, **self._totals, **self._lows, **self._highs}


class Timings:
    """Seconds by name. CUDA work is waited for, so that it is booked where it was done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`."""
        start = now()
        try:
            yield
        finally:
            self.add(name, now() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds taken elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def result(self, prefix: str) -> dict[str, float]:
        """Seconds under `prefix/name`."""
        return {f"{prefix}/{name}": value for name, value in self.seconds.items()}


def now() -> float:
    """Seconds of a clock that only rises, with all CUDA work done."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def mean_and_std(values: Tensor) -> tuple[float, float]:
    """Mean and sample standard deviation of float [N], NaN left out; NaN where too few are left."""
    values = values[~values.isnan()].double()
    mean = float(values.mean()) if values.numel() else math.nan
    return mean, float(values.std()) if values.numel() > 1 else (0.0 if values.numel() else math.nan)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without NaN and infinities, which JSON and trackers cannot hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def largest(of_ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest value of each metric over ranks."""
    found: dict[str, float] = {}
    for metrics in of_ranks:
        for name, value in metrics.items():
            found[name] = max(value, found.get(name, value))
    return found


def joined(of_ranks: Iterable[MetricSums]) -> dict[str, float]:
    """Metrics over all ranks, from each rank's part of them."""
    sums = MetricSums()
    for part in of_ranks:
        sums.merge(part)
    return sums.result()
