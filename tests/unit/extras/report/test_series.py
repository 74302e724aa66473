"""Curves of bounded length, and the parts of steps."""

from pathlib import Path

import pytest

from hybrid_rl.extras.report import step_phases as phases
from hybrid_rl.extras.report.charts import guides_of, layout
from hybrid_rl.extras.report.runs import flat, load
from hybrid_rl.extras.report.series import curves, stretches
from tests.support.run_case import metrics, timeline, write_run


def test_curves_of_few_points_are_as_they_are() -> None:
    records = [{"step": 0, "eval/reward": 0.5}, {"step": 1, "reward": 1}, {"step": 2, "reward": 2.0, "note": "x"}]
    records += [{"step": 3, "reward": float("nan"), "is": True}]
    found = curves(records)
    assert found["metrics"].keys() == {"eval/reward", "reward"}
    axis, values = found["metrics"]["reward"]
    assert found["axes"][axis] == [1, 2] and values == [1.0, 2.0]


def test_long_curves_are_means_and_extremes_of_neighbours() -> None:
    records = [{"step": step, "reward": float(step), "ratio/max": float(step % 7)} for step in range(1, 7)]
    found = curves(records, max_points=2)
    axis, means = found["metrics"]["reward"]
    assert found["axes"][axis] == [3, 6] and means == [2.0, 5.0]
    assert found["metrics"]["ratio/max"] == [axis, [3.0, 6.0]]


def test_ten_thousand_steps_have_a_thousand_points_each() -> None:
    found = curves([{"step": step, "a": 1.0} for step in range(10_000)])
    assert found["axes"] == [list(range(9, 10_000, 10))] and found["metrics"]["a"] == [0, [1.0] * 1000]


@pytest.mark.parametrize("number", [0, 1, 5, 6, 13])
def test_stretches_cover_everything_once(number: int) -> None:
    bounds = stretches(number, 5)
    assert [place for start, end in bounds for place in range(start, end)] == list(range(number))
    assert len(bounds) == min(number, 5)


def test_parts_of_a_step_are_all_of_it() -> None:
    """Of 1.35 s the driver waited 0.7 for the rollout: 0.5 of that for generation and 0.1 for rewards."""
    found = phases.parts_of(metrics(4), timeline(4))
    expected = {"generation": 0.5, "rewards": 0.1, "collecting": 0.1, "logprobs": 0.05, "update": 0.2}
    expected |= {"handoff": 0.05, "evaluation": 0.25, "other": 0.1}
    assert {name: seconds for name, seconds in found.items() if seconds} == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(1.35)


def test_parts_of_the_slowest_ranks_never_exceed_the_wait() -> None:
    record = metrics(1) | {"timing/rollout": 0.9, "timing/reward": 0.5}  # of different ranks
    found = phases.parts_of(record, timeline(1))
    assert found["generation"] == pytest.approx(0.45) and found["rewards"] == pytest.approx(0.25)
    assert found["collecting"] == 0


def test_parts_without_a_timeline_come_from_the_metrics() -> None:
    found = phases.parts_of(metrics(4), None)
    assert found["generation"] == 0.5 and found["evaluation"] == 0.25
    assert found["other"] == pytest.approx(1.25 - 0.5 - 0.1 - 0.2 - 0.25)


def test_phases_of_an_evaluation_are_shown_with_their_step() -> None:
    """Ranks tell of them with the next step, 0.4 s before its start at 1007.5: 1.1 s after the start of step 4."""
    strips = {strip["step"]: strip for strip in phases.strips({step: timeline(step) for step in range(1, 7)})}
    assert strips[4]["ranks"][0][-1] == ["generate", pytest.approx(1.1), 0.25]
    assert all(start >= 0 for _, start, _ in strips[5]["ranks"][0])
    assert len(strips) == 6


def test_few_steps_are_shown_over_time() -> None:
    strips = phases.strips({step: timeline(step) for step in range(1, 1001)})
    steps = [strip["step"] for strip in strips]
    assert len(steps) <= phases.MAX_STRIPS and steps[:2] == [1, 2] and steps[-1] == 1000


def test_charts_are_those_of_the_metrics_that_there_are(tmp_path: Path) -> None:
    first, second = load(write_run(tmp_path / "run", 5), "a").shown, load(write_run(tmp_path / "other", 5), "b").shown
    second["curves"]["metrics"]["rewards/mine/mean"] = [0, [1.0]]
    charts = {chart["title"]: chart for section in layout([first, second]) for chart in section["charts"]}
    assert charts["mean of each reward function"]["metrics"] == ["rewards/mine/mean"]
    assert "critic: value loss" not in charts
    (tolerance,) = charts["gap of the probe prompt"]["guides"]
    assert tolerance["high"] == 1e-3 and tolerance["kind"] == "limit"  # of float32, said once for both


def test_guides_of_a_configuration() -> None:
    config = flat(
        {"policy_loss": {"epsilon": 0.2, "epsilon_high": None}, "rollout": {"handoff": {"probe_tolerance": 0.5}}}
    )
    found = guides_of(config)
    assert (found["ratio/mean"][0].low, found["ratio/mean"][0].high) == (0.8, 1.2)
    assert found["handoff/probe_gap"][0].high == 0.5
    assert guides_of({}) == {}
