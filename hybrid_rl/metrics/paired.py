"""Comparison of two policies on the same prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybrid_rl.errors import DataError
from hybrid_rl.metrics.intervals import LEVEL

MOST_STEPS = 4_000_000_000  # of the exact distribution: some seconds
NUM_FLIPS = 100_000
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class PairedTest:
    """The difference between two policies on the same prompts, B minus A.

    difference: mean over prompts of B's share of right samples minus A's; low, high: its 95 % confidence interval.
    p_value: of the hypothesis that they are equally good, two-sided. num_prompts: of both; num_better, num_worse: on
    which B is better or worse than A. test: which test gave p_value.
    """

    difference: float
    low: float
    high: float
    p_value: float
    num_prompts: int
    num_better: int
    num_worse: int
    test: str

    @property
    def is_noise(self) -> bool:
        """Whether the difference may be chance (p_value of 0.05 or more)."""
        return self.p_value >= SIGNIFICANT

    def verdict(self, a: str = "A", b: str = "B") -> str:
        """Say in words who is better, by how much, and whether that may be noise."""
        counts = f"better on {self.num_better}, worse on {self.num_worse} of {self.num_prompts} prompts"
        shown = f"{100 * self.difference:+.1f} points (95 % interval {100 * self.low:+.1f} to {100 * self.high:+.1f})"
        p_value = f"p = {self.p_value:.3f}" if self.p_value >= 0.001 else "p < 0.001"
        if self.is_noise:
            half = 50 * (self.high - self.low)
            return (
                f"This may be noise: {b} against {a} is {shown}, {counts}, {p_value} ({self.test}). With these prompts "
                f"and samples, differences below about {half:.1f} points cannot be told from chance."
            )
        wins, losses, low, high, winner, loser = self.num_better, self.num_worse, self.low, self.high, b, a
        if self.difference < 0:
            wins, losses, low, high, winner, loser = losses, wins, -high, -low, a, b
        by = f"{100 * abs(self.difference):.1f} points (95 % interval {100 * low:.1f} to {100 * high:.1f})"
        counts = f"better on {wins}, worse on {losses} of {self.num_prompts} prompts"
        return f"{winner} is better than {loser} by {by}, {counts}, {p_value} ({self.test})."


def paired_test(a: ArrayLike, b: ArrayLike, *, num_samples: tuple[int, int] = (1, 1), seed: int = 0) -> PairedTest:
    """Compare two policies on the same prompts.

    a, b: [M] shares of right samples of each prompt, the same prompt in the same place. num_samples: samples per prompt
    of a and of b.

    p_value is that of the sign-flip permutation test over prompts: if both were equally good, each prompt's difference
    would have either sign with equal probability. It is exact, from the whole distribution (a convolution over
    prompts), as long as that takes seconds; beyond, from NUM_FLIPS random flips with a fixed seed. With one sample per
    prompt it is McNemar's exact test, a binomial test of the prompts on which they differ.

    The interval is Bonett and Price's for paired shares (2012, Journal of Educational and Behavioral Statistics 37):
    Wald's after one more prompt on which B is better by 1, and one on which it is worse by 1, were added.

    Raises DataError if there is no prompt, or if the numbers are not pairs of shares.
    """
    first, second = (np.asarray(values, dtype=np.float64) for values in (a, b))
    if first.shape != second.shape or first.ndim != 1 or not first.size:
        raise DataError(
            f"a paired test needs one number per prompt from each, but got {first.shape} and {second.shape}"
        )
    differences = second - first
    if not (np.abs(differences) <= 1 + 1e-9).all():
        raise DataError("a paired test compares shares, numbers from 0 to 1")
    denominator = math.lcm(*num_samples)
    steps = np.rint(differences * denominator).astype(np.int64)
    is_exact = bool((np.abs(steps - differences * denominator) < 1e-6).all())
    is_exact = is_exact and len(steps) * int(np.abs(steps).sum()) <= MOST_STEPS
    p_value = _exact(steps) if is_exact else _sampled(differences, seed)
    padded = np.append(differences, [1.0, -1.0])
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    half = z * math.sqrt(float(padded.var()) / len(padded))
    kind = "exact" if is_exact else f"{NUM_FLIPS:,} random flips"
    return PairedTest(
        difference=float(differences.mean()),
        low=max(-1.0, float(padded.mean()) - half),
        high=min(1.0, float(padded.mean()) + half),
        p_value=p_value,
        num_prompts=len(differences),
        num_better=int((differences > 1e-12).sum()),
        num_worse=int((differences < -1e-12).sum()),
        test="McNemar's exact test" if num_samples == (1, 1) else f"sign-flip test over prompts, {kind}",
    )


def _exact(steps: NDArray[np.int64]) -> float:
    """Return the probability that a sum with random signs is as far from 0 as that of whole numbers [M]."""
    sizes = np.abs(steps[steps != 0])
    if not sizes.size:
        return 1.0
    divisor = int(np.gcd.reduce(sizes))
    sizes, observed = sizes // divisor, abs(int(steps.sum())) // divisor
    # Of the sum of the numbers whose sign is +, at half of each step: the sum with signs is 2 * plus - total.
    total = int(sizes.sum())
    chances = np.zeros(total + 1)
    chances[0], reach = 1.0, 0
    for size in sizes.tolist():
        chances[: reach + size + 1] *= 0.5
        chances[size : reach + size + 1] += chances[: reach + 1].copy()
        reach += size
    distance = np.abs(2 * np.arange(total + 1) - total)
    return min(1.0, float(chances[distance >= observed].sum()))


def _sampled(differences: NDArray[np.float64], seed: int) -> float:
    """Return the same from random signs; the observed ones count as one more draw, so that it is never 0."""
    generator = np.random.default_rng(seed)
    moving = differences[differences != 0]
    observed, at_least, left = abs(float(moving.sum())) - 1e-9, 0, NUM_FLIPS
    while left:
        number = min(left, max(1, 10_000_000 // max(1, moving.size)))
        signs = generator.integers(0, 2, (number, moving.size), dtype=np.int8) * 2 - 1
        at_least += int((np.abs(signs @ moving) >= observed).sum())
        left -= number
    return (at_least + 1) / (NUM_FLIPS + 1)
