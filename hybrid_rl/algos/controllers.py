"""Numbers that follow what is measured during a run."""

from __future__ import annotations

import math

MAX_ERROR = 0.2


def next_beta(beta: float, measured: float, *, target: float | None, horizon: int, num_samples: int) -> float:
    """The weight of a KL penalty after a training step (Ziegler et al., arXiv:1909.08593, section 2.2).

    error = clip(measured / target - 1, -0.2, 0.2); beta <- beta * (1 + error * num_samples / horizon). The paper writes
    K_beta = 0.1 per batch for num_samples / horizon; its code has a horizon of 10000 samples. target: in the unit of
    `measured` (the paper: nats per completion); None = fixed, beta stays. measured: the KL of this step, by k1 perhaps
    negative. num_samples: completions of the step, over all ranks.
    """
    if target is None:
        return beta
    if not target > 0 or not horizon > 0 or num_samples < 0:
        raise ValueError(
            f"target={target} and horizon={horizon} must be above 0, num_samples={num_samples} must be 0 or more"
        )
    if math.isnan(measured):
        raise ValueError("the measured KL is not a number, so beta cannot follow it; look for NaN in the logprobs")
    if num_samples * MAX_ERROR >= horizon:
        raise ValueError(
            f"horizon={horizon} samples is so short that one step of {num_samples} samples could turn beta negative; "
            f"use more than {num_samples * MAX_ERROR:g}"
        )
    error = min(max(measured / target - 1, -MAX_ERROR), MAX_ERROR)
    return beta * (1 + error * num_samples / horizon)


def next_entropy_coef(coef: float, measured: float, *, target: float, low: float, high: float, delta: float) -> float:
    """The weight of an entropy bonus after an optimizer step: up by `delta` to at most `high` where the mean entropy of
    a token is at most `target`, else down by it to at least `low` (Skywork-OR1, arXiv:2505.22312; the bounds are those
    of TRL's use_adaptive_entropy). An entropy that is no number counts as above."""
    return min(coef + delta, high) if measured <= target else max(coef - delta, low)
