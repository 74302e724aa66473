"""Estimates of KL(policy || reference) from one sampled token each (J. Schulman, "Approximating KL divergence",
2020)."""

from __future__ import annotations

from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) for tokens sampled from the policy. Both [T], natural logs.

    With r = reference / policy: k1 = -ln r (unbiased, may be negative), k2 = (ln r)^2 / 2 (biased, never negative),
    k3 = r - 1 - ln r (unbiased, never negative). As a loss, the expected gradient of k1 is zero, that of k2 is the
    gradient of KL(policy || reference), that of k3 the gradient of KL(reference || policy).
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return log_ratio.expm1() - log_ratio
    raise ValueError(f"estimator={estimator!r} is unknown; use k1, k2 or k3")
