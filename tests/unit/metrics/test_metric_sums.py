"""Sums that join, and one way to take time."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from hybrid_rl.metrics import metric_sums as metrics
from hybrid_rl.metrics.metric_sums import MetricSums, Timings, finite, joined, largest, mean_and_std

# What four micro-batches saw of one mini-batch: total and count of a mean, then a low and a high.
PARTS = [(6.0, 3, -1.0, 2.0), (10.0, 1, 0.5, 0.7), (0.0, 0, math.nan, math.nan), (-4.0, 4, -0.25, 9.0)]


def sums_of(parts: list[tuple[float, float, float, float]]) -> MetricSums:
    sums = MetricSums()
    for total, count, low, high in parts:
        sums.mean("mean", total, count)
        sums.low("low", low)
        sums.high("high", high)
    return sums


@pytest.mark.parametrize("cut", [[4], [1, 1, 1, 1], [2, 2], [3, 1], [1, 3]])
def test_any_cut_joins_to_the_same(cut: list[int]) -> None:
    """(6 + 10 + 0 - 4) / 8 = 1.5, where the mean of means would be 11 / 4 or worse."""
    together, start, of_ranks = MetricSums(), 0, []
    for size in cut:
        of_ranks.append(sums_of(PARTS[start : start + size]))
        together.merge(of_ranks[-1])
        start += size
    assert together.result() == joined(of_ranks) == {"mean": 1.5, "low": -1.0, "high": 9.0}


def test_nothing_counted_is_left_out() -> None:
    assert sums_of([PARTS[2]]).result() == {}


def test_merging_leaves_the_other_alone() -> None:
    one, other = sums_of(PARTS[:1]), sums_of(PARTS[1:2])
    one.merge(other)
    assert other.result() == {"mean": 10.0, "low": 0.5, "high": 0.7}


def test_timings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.5, 10.0, 10.25])
    monkeypatch.setattr(metrics, "now", lambda: next(clock))
    timings = Timings()
    with timings.measure("update"):
        pass
    with pytest.raises(RuntimeError), timings.measure("update"):
        raise RuntimeError("still counted")
    timings.add("reward", 4.0)
    assert timings.result("timing") == {"timing/update": 2.75, "timing/reward": 4.0}


@pytest.mark.parametrize(
    ("values", "mean", "std"),
    [
        ([1.0, 0.0, 0.0, 0.0], 0.25, 0.5),
        ([1.0, math.nan, 3.0], 2.0, math.sqrt(2)),
        ([5.0], 5.0, 0.0),
        ([math.nan], math.nan, math.nan),
        ([], math.nan, math.nan),
    ],
)
def test_mean_and_std(values: list[float], mean: float, std: float) -> None:
    assert mean_and_std(torch.tensor(values)) == pytest.approx((mean, std), nan_ok=True)


def test_finite() -> None:
    assert finite({"a": 1.0, "b": math.nan, "c": math.inf, "d": -math.inf, "e": 0}) == {"a": 1.0, "e": 0}


def test_a_rank_that_did_nothing_changes_nothing() -> None:
    """A rank without samples, and what is counted once: by rank 0, the others adding zero of nothing."""
    first, second = MetricSums(), MetricSums()
    first.mean("loss", 0.75, 1)
    second.mean("loss", 0.5, 0)  # its part of one loss: added, not averaged
    first.total("skipped_updates", 1)
    second.total("skipped_updates", 2)
    assert joined([first, second, MetricSums()]) == {"loss": 1.25, "skipped_updates": 3.0}
    assert joined([]) == {}


def test_largest_of_all_ranks_with_what_only_some_know() -> None:
    """Timings and bytes: the slowest and the fullest rank decides. Zero and negative numbers are numbers."""
    of_ranks = [{"a": 1.0, "b": -2.0}, {"a": 3.0, "b": -5.0, "c": 0.0}, {"a": 2.0}]
    assert largest(of_ranks) == {"a": 3.0, "b": -2.0, "c": 0.0}
    assert largest([]) == {}


def test_tensors_are_the_same_numbers_read_later():
    values = torch.tensor([0.1, 0.7, -2.5, float("nan")])
    now, later = MetricSums(), MetricSums()
    for value in values[:3]:
        now.mean("mean", float(value), 2)
        later.mean("mean", value, 2)
    for value in values:
        now.low("low", float(value))
        later.low("low", value)
        now.high("high", float(value))
        later.high("high", value)
    now.mean("a", 0.25, 4)
    now.mean("b", 3.0, 4)
    later.means(("a", "b"), torch.tensor([0.25, 3.0], dtype=torch.float64), 4)
    outer = MetricSums()
    outer.merge(later)
    assert len(outer.unread()) == 13
    assert outer.result() == now.result() and len(outer.unread()) == 0
    assert outer.parts("mean") == now.parts("mean")


def test_numbers_may_be_read_in_a_copy_of_the_caller():
    sums = MetricSums()
    sums.mean("x", torch.tensor(1.5), 1)
    numbers = sums.unread() * 2
    sums.settle(numbers)
    sums.mean("x", torch.tensor(1.0), 1)
    assert sums.result() == {"x": 2.0}


def test_what_travels_holds_no_tensor():
    sums = MetricSums()
    sums.mean("x", torch.tensor(1.5), 1)
    data = pickle.dumps(sums)
    assert b"torch" not in data and pickle.loads(data).result() == {"x": 1.5}
