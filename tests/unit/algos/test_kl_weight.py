"""The adaptive weight of a KL penalty, by hand."""

from __future__ import annotations

import math

import pytest

from hybrid_rl.algos.kl import next_beta


# K = num_samples / horizon = .1 as in the paper; errors beyond +-.2 count as that.
@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (6.0, 0.05),  # on target
        (6.6, 0.0505),  # 10 % above: 1 + .1 * .1
        (5.4, 0.0495),
        (7.2, 0.051),  # exactly at the clip
        (60.0, 0.051),
        (math.inf, 0.051),
        (0.0, 0.049),
        (-3.0, 0.049),  # k1 of a few samples may be negative
    ],
)
def test_by_hand(measured: float, expected: float) -> None:
    found = next_beta(0.05, measured, target=6.0, horizon=10000, num_samples=1000)
    assert found == pytest.approx(expected, rel=1e-14)


def test_a_step_counts_by_its_samples() -> None:
    """Twice the samples, twice the relative step; without any, none."""
    assert next_beta(1.0, 9.0, target=6.0, horizon=10000, num_samples=2000) == pytest.approx(1.04, rel=1e-14)
    assert next_beta(1.0, 9.0, target=6.0, horizon=10000, num_samples=0) == 1.0


def test_without_a_target_it_is_fixed() -> None:
    assert next_beta(0.05, 60.0, target=None, horizon=10000, num_samples=1000) == 0.05


def test_it_finds_the_weight_that_gives_the_target() -> None:
    """A policy whose KL is 1 / beta: beta goes to 1 / target from either side and stays there."""
    for beta in (0.01, 3.0):
        for _ in range(4000):
            beta = next_beta(beta, 1 / beta, target=6.0, horizon=10000, num_samples=128)
        assert beta == pytest.approx(1 / 6, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measured": math.nan}, "not a number"),
        ({"target": 0.0}, "above 0"),
        ({"horizon": 0}, "above 0"),
        ({"num_samples": -1}, "0 or more"),
        ({"horizon": 200}, "use more than 200"),
    ],
)
def test_refuses(options: dict[str, float], message: str) -> None:
    """A horizon of 200 with 1000 samples: 1 - .2 * 5 = 0 would end the penalty for ever."""
    arguments = {"measured": 6.0, "target": 6.0, "horizon": 10000, "num_samples": 1000, **options}
    with pytest.raises(ValueError, match=message):
        next_beta(0.05, **arguments)  # type: ignore[arg-type]
