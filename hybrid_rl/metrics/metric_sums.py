"""Metrics of a training step: sums that join over micro-batches and ranks, and timers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


class MetricSums:
    """Weighted means, totals, minima and maxima that join exactly, however the batch was split.

    Numbers may be added as tensors. They are read all at once: when a number is requested, or from a copy that the
    caller makes between `unread` and `settle`. Until then nothing waits for the device that computes them.
    """

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._totals: dict[str, float] = {}
        self._lows: dict[str, float] = {}
        self._highs: dict[str, float] = {}
        self._unread: list[_Unread] = []

    def mean(self, name: str, total: float | Tensor, count: float) -> None:
        """Add `total` over `count` items to a mean. total: a number, or a tensor of no dimensions."""
        if isinstance(total, Tensor):
            self.means((name,), total[None], count)
            return
        before = self._means.get(name, (0.0, 0.0))
        self._means[name] = (before[0] + total, before[1] + count)

    def means(self, names: Sequence[str], totals: Tensor, count: float) -> None:
        """Add to several means over the same `count` items. totals: float [len(names)], on any device."""
        self._unread.append(_Unread("mean", tuple(names), totals.detach(), (count,)))

    def parts(self, name: str) -> tuple[float, float]:
        """Return sum and count of a mean; zeros if nothing was added."""
        self._read()
        return self._means.get(name, (0.0, 0.0))

    def total(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._totals[name] = self._totals.get(name, 0.0) + value

    def low(self, name: str, value: float | Tensor) -> None:
        """Keep the smallest value; NaN is ignored."""
        if isinstance(value, Tensor):
            self._unread.append(_Unread("low", (name,), value.detach()[None]))
        elif not math.isnan(value):
            self._lows[name] = min(value, self._lows.get(name, math.inf))

    def high(self, name: str, value: float | Tensor) -> None:
        """Keep the largest value; NaN is ignored."""
        if isinstance(value, Tensor):
            self._unread.append(_Unread("high", (name,), value.detach()[None]))
        elif not math.isnan(value):
            self._highs[name] = max(value, self._highs.get(name, -math.inf))

    def merge(self, other: MetricSums) -> None:
        """Add all sums of another object."""
        for name, (total, count) in other._means.items():
            self.mean(name, total, count)
        for numbers, add in ((other._totals, self.total), (other._lows, self.low), (other._highs, self.high)):
            for name, value in numbers.items():
                add(name, value)
        self._unread += other._unread

    def unread(self) -> Tensor:
        """Return all numbers added as tensors and not read yet, float [K]; empty if there are none."""
        return torch.cat([part.values for part in self._unread]) if self._unread else torch.zeros(0)

    def settle(self, numbers: Tensor) -> None:
        """Take the values of `unread`, read on the host."""
        values = iter(numbers.tolist())
        waiting, self._unread = self._unread, []
        for part in waiting:
            for name in part.names:
                getattr(self, part.kind)(name, next(values), *part.count)

    def _read(self) -> None:
        if self._unread:
            self.settle(self.unread())

    def __getstate__(self) -> dict[str, Any]:
        self._read()  # pickle numbers, not tensors
        return self.__dict__

    def result(self) -> dict[str, float]:
        """Return all metrics; a mean over nothing is left out."""
        self._read()
        means = {name: total / count for name, (total, count) in self._means.items() if count}
        return {**means, **self._totals, **self._lows, **self._highs}


@dataclass(frozen=True)
class _Unread:
    """Numbers that are still on their device, [len(names)]. kind: the method that adds each; count: of a mean."""

    kind: Literal["mean", "low", "high"]
    names: tuple[str, ...]
    values: Tensor
    count: tuple[float, ...] = ()


class Timings:
    """Seconds by name. Waits for CUDA work, so that it counts in the block that started it."""

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
        """Add seconds measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def result(self, prefix: str) -> dict[str, float]:
        """Return the seconds under `prefix/name`."""
        return {f"{prefix}/{name}": value for name, value in self.seconds.items()}


def now() -> float:
    """Read a monotonic clock, in seconds, after all CUDA work is done."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def mean_and_std(values: Tensor) -> tuple[float, float]:
    """Compute mean and sample standard deviation of float [N], ignoring NaN; NaN if too few values are left."""
    values = values[~values.isnan()].double()
    mean = float(values.mean()) if values.numel() else math.nan
    return mean, float(values.std()) if values.numel() > 1 else (0.0 if values.numel() else math.nan)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without NaN and infinities, which JSON and trackers cannot hold."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def largest(of_ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each metric over ranks."""
    maxima: dict[str, float] = {}
    for metrics in of_ranks:
        for name, value in metrics.items():
            maxima[name] = max(value, maxima.get(name, value))
    return maxima


def joined(of_ranks: Iterable[MetricSums]) -> dict[str, float]:
    """Join the parts of all ranks to one set of metrics."""
    sums = MetricSums()
    for part in of_ranks:
        sums.merge(part)
    return sums.result()


def number(value: float | None) -> str:
    """Format a number for a table; a dash if there is none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"
