"""What the scripts make of measured steps, rollouts and curves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import grpo_step, learning, rollout
from benchmarks.learning import Curve
from benchmarks.rollout import Rollout

pytestmark = pytest.mark.slow


def step(wall: float, tokens: int, peak: int = 0) -> dict[str, Any]:
    names = ("wall", "cpu", "system", "generation", "update")
    seconds = {f"{name}_seconds": wall * (place + 1) for place, name in enumerate(names)}
    return {**seconds, "num_tokens": tokens, "longest_tokens": tokens, "reward": 0.5, "peak_rss_bytes": peak}


def test_comparison_of_steps() -> None:
    ours = [step(1.0, 10), step(2.0, 10), step(4.0, 10, peak=200)]
    peer = [step(6.0, 20), step(6.0, 20), step(8.0, 20, peak=500)]
    found = grpo_step.compare(ours, peer)
    assert found["wall_ratio"] == found["update_ratio"] == 3.0
    assert found["ratio_per_token"] == pytest.approx(0.3 / 0.2)
    assert found["ratio_of_pairs"]["median"] == 3.0
    assert found["ratio_of_pairs"]["max"] == 6.0
    assert found["peak_rss_ratio"] == 2.5


def test_summary_leaves_the_warm_up_out_of_times_but_not_out_of_memory() -> None:
    found = grpo_step.summary([step(9.0, 99), step(1.0, 10, peak=300)], 1, {"imports_rss_bytes": 100})
    assert found["wall_seconds"]["median"] == 1.0
    assert found["num_tokens"] == 10
    assert found["warmup_wall_seconds"] == [9.0]
    assert found["peak_rss_above_imports_bytes"] == 200


def test_comparison_of_rollouts_is_by_tokens() -> None:
    ours = [Rollout(1.0, 1.0, [30, 10]), Rollout(2.0, 1.0, [60, 20])]
    peer = [Rollout(4.0, 2.0, [40, 40]), Rollout(4.0, 2.0, [40, 40])]
    found = rollout.compare(ours, peer, ("wall_seconds", "cpu_seconds"))
    assert found["rate_ratio"] == 2.0
    assert found["wall_seconds_ratio"] == pytest.approx(4.0 / 1.5)
    assert found["cpu_seconds_ratio"] == 2.0
    assert rollout.summary(ours, ("wall_seconds",))["num_tokens"] == 60


def test_completions_are_counted_up_to_the_first_end() -> None:
    assert rollout.lengths_of(torch.tensor([[5, 1, 0, 0], [5, 5, 5, 5], [1, 1, 5, 1], [5, 5, 5, 1]])) == [2, 4, 1, 4]


def test_comparison_of_curves() -> None:
    samples = [100, 200]
    runs = [
        {"hybrid_rl": Curve([0.5, 0.9], samples, [1.0, 2.0]), "trl": Curve([0.4, 0.8], samples, [2.0, 4.0])},
        {"hybrid_rl": Curve([0.8, 0.7], samples, [1.0, 2.0]), "trl": Curve([0.1, 0.7], samples, [3.0, 6.0])},
    ]
    found = learning.compare(runs, goal=0.75)
    assert found["final_accuracy"] == pytest.approx({"hybrid_rl": 0.8, "trl": 0.75})
    assert found["final_accuracy_difference"]["mean"] == pytest.approx(0.05)
    assert found["seconds_ratio"] == 2.5
    # When our side was through, after 2 s, TRL had 0.4 in the first run and had not been evaluated in the second.
    assert found["at_equal_seconds"] == pytest.approx({"hybrid_rl": 0.8, "trl": 0.2})
    ours, peer = found["goal"]["hybrid_rl"], found["goal"]["trl"]
    assert (ours["num_reached"], ours["median_num_samples"], ours["median_seconds"]) == (2, 150, 1.5)
    assert (peer["num_reached"], peer["median_num_samples"], peer["median_seconds"]) == (1, 200, 4.0)


def test_a_goal_nobody_reached_has_no_time() -> None:
    run = {name: Curve([0.1], [10], [1.0]) for name in learning.SIDES}
    assert learning.reaching([run], "trl", 0.5)["median_seconds"] is None
