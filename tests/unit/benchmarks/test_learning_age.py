"""What the experiment with samples of older weights makes of its curves, and a run of it that is too short to learn."""

from __future__ import annotations

import pytest

from benchmarks.learning_age import DEFAULT, VARIANTS, Curve, arguments, compare, learn
from hybrid_rl.extras.quickstart.model import build_model, build_tokenizer
from hybrid_rl.extras.quickstart.task import build_task


def test_comparison_by_hand() -> None:
    samples = [0, 100, 200]
    runs = [
        {
            "synchronous": Curve([0.4, 0.6, 0.8], samples, [0.0, 4.0, 8.0]),
            "partial": Curve([0.4, 0.5, 0.9], samples, [0.0, 2.0, 4.0], mean_age=0.5),
        },
        {
            "synchronous": Curve([0.2, 0.4, 0.6], samples, [0.0, 4.0, 8.0]),
            "partial": Curve([0.2, 0.5, 0.6], samples, [0.0, 5.0, 10.0], mean_age=0.7),
        },
    ]
    found = compare(runs, goal=0.85)
    own, base = found["partial"], found["synchronous"]
    assert own["final_accuracy"]["mean"] == pytest.approx(0.75)
    assert base["final_difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "count": 2}
    # Final differences 0.1 and 0: their standard deviation is 0.1 / sqrt(2), and t of one degree of freedom 12.7062.
    assert own["final_difference"]["mean"] == pytest.approx(0.05)
    assert own["final_difference"]["high"] == pytest.approx(0.05 + 12.7062 * 0.1 / 2)
    assert own["is_within"]  # 0.75 lies between 0.7 - 1.27 and 0.7 + 1.27
    assert own["mean_difference"]["mean"] == pytest.approx(((0.6 - 0.6) + (1.3 / 3 - 0.4)) / 2)
    # When the faster side was through, after 4 s and 8 s: 0.9 against 0.6, and 0.5 against 0.6.
    assert own["difference_at_equal_seconds"]["mean"] == pytest.approx((0.3 - 0.1) / 2)
    assert own["times_as_fast"] == pytest.approx((2 + 0.8) / 2)
    assert [one["mean"] for one in own["accuracy_by_samples"]] == pytest.approx([0.3, 0.5, 0.75])
    assert own["goal"] == {"accuracy": 0.85, "num_reached": 1, "num_seeds": 2, "median_seconds": 4.0}
    assert base["goal"]["median_seconds"] is None and own["mean_age"] == pytest.approx(0.6)


def test_a_mean_outside_of_the_interval_is_not_within() -> None:
    runs = [
        {name: Curve([final], [100], [1.0]) for name, final in (("synchronous", base), ("partial", base - 0.2))}
        for base in (0.80, 0.81, 0.82)
    ]
    assert not compare(runs, 0.5)["partial"]["is_within"] and compare(runs, 0.5)["synchronous"]["is_within"]


@pytest.mark.slow
def test_every_variant_trains_on_as_many_samples_and_on_the_ages_that_it_is_for() -> None:
    given = arguments(["--steps", "2", "--eval-every", "1", "--prompts", "4", "--generations", "2"])
    given.variants = [*DEFAULT]
    task = build_task(0, num_train=40, num_heldout=8)
    curves = learn(build_model(build_tokenizer(), 0), 0.0, task, 0, given)
    assert set(curves) == {*DEFAULT} < {*VARIANTS}
    for curve in curves.values():
        assert curve.num_samples == [0, 8, 16] and len(curve.accuracies) == 3
        assert curve.seconds == sorted(curve.seconds)
    ages = {name: curve.mean_age for name, curve in curves.items()}
    assert ages["synchronous"] == 0 < ages["partial"] == ages["partial, no correction"] == ages["one step off"]
    assert ages["one step off"] == 0.5  # one version, in the second of two steps
