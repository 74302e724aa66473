"""Confidence intervals of shares of prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from hybrid_rl.errors import DataError

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A share with its confidence interval, all from 0 to 1. num_prompts: those that it was computed from."""

    value: float
    low: float
    high: float
    num_prompts: int

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


def share(of_prompts: ArrayLike, num_independent: int = 1, level: float = LEVEL) -> Estimate:
    """Return the mean of one number from 0 to 1 per prompt, with a confidence interval over prompts.

    of_prompts: [M], for example the share of right samples of each. num_independent: how many independent draws such a
    number is made of at most, for example its samples.

    The interval is Wilson's with the effective number of draws in place of their number, as surveys with clusters use
    it (Korn and Graubard 1998; Dean and Pagano 2015): p (1 - p) / Var(mean), where Var(mean) comes from the spread
    between prompts. Samples of one prompt resemble each other and count for less than as many prompts: the effective
    number lies between M and M * num_independent. With one sample per prompt it is M, and the interval is Wilson's own.
    Unlike a bootstrap it does not collapse if all prompts are right, or all wrong, and needs no random numbers.

    Raises DataError if there is no prompt, or a number outside of 0 to 1.
    """
    numbers = np.asarray(of_prompts, dtype=np.float64)
    if numbers.size == 0:
        raise DataError("there is no prompt to take a share of")
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and (numbers <= 1 + 1e-9).all()):
        raise DataError("a share of prompts needs numbers from 0 to 1")
    m, p = numbers.size, min(float(numbers.mean()), 1.0)
    variance = float(numbers.var()) / m
    draws = float(m)
    if p * (1 - p) > 0:
        most = float(m * num_independent)
        draws = min(max(p * (1 - p) / variance, m), most) if variance > 0 else most
    low, high = _wilson(p, draws, level)
    return Estimate(p, low, high, m)


def _wilson(p: float, n: float, level: float) -> tuple[float, float]:
    """Return Wilson's score interval of a share p of n draws."""
    z = NormalDist().inv_cdf(0.5 + level / 2)
    centre, denominator = p + z * z / (2 * n), 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / denominator), min(1.0, (centre + half) / denominator)
