"""The KL divergence between policy and reference: estimates from one sampled token each, exact over the vocabulary, as
a reward, and the weight that follows it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_rl.algos.columns import at_least_float32, bounded, check_columns

ESTIMATORS = ("k1", "k2", "k3", "abs")
MAX_ERROR = 0.2  # of the measured KL against its target, in one step


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) for tokens sampled from the policy. Float [T], natural logs.

    With r = reference / policy (J. Schulman, "Approximating KL divergence", 2020):

    - k1 = -ln r: unbiased, may be negative
    - k2 = (ln r)^2 / 2: biased, never negative
    - k3 = r - 1 - ln r: unbiased, never negative; ln r above 20 counts as 20, in value and slope (`bounded`)
    - abs = |ln r|: no KL; its mean is at least the KL

    What minimising one really does is another matter than its value. Expected gradients over tokens of the policy, as a
    loss, as a loss times policy / old with its gradient (tokens of an older policy), and as a detached penalty in the
    reward:

    - k1: zero; that of KL(policy || reference); that of KL(policy || reference)
    - k2: that of KL(policy || reference); that of its own mean; neither
    - k3: that of KL(reference || policy); that of KL(policy || reference); the difference of these two,
      KL(policy || reference) - KL(reference || policy)
    - abs: that of sum |policy - reference|, twice the total variation; that of its own mean; neither
    """
    check_columns(logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = at_least_float32(ref_logprobs) - at_least_float32(logprobs)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        log_ratio = bounded(log_ratio)
        return log_ratio.expm1() - log_ratio
    if estimator == "abs":
        return log_ratio.abs()
    raise ValueError(f"estimator={estimator!r} is unknown; use {', '.join(ESTIMATORS[:-1])} or {ESTIMATORS[-1]}")


def exact_kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(policy || reference) at each place, sum over the vocabulary of p (ln p - ln p_ref): float [T].

    Its gradient is that of KL(policy || reference) at this place, whoever sampled the tokens: no importance weight
    belongs on it. What a token changes about the places after it is left out, as with every penalty in the loss.

    log_probs: float [T, V] with gradient, natural logs, normalised; ref_log_probs: [T, V], taken as constant. Tokens
    that the policy cannot make (ln p = -inf) count 0; where the reference alone excludes a token the KL is inf. mask:
    bool [T]; where it is False the KL is 0 without gradient, whatever stands there.
    """
    if log_probs.dim() != 2 or log_probs.shape != ref_log_probs.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} and ref_log_probs {tuple(ref_log_probs.shape)} must both be [T, V], "
            "the whole vocabulary at each token"
        )
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != log_probs.shape[:1]:
            raise ValueError(f"mask must be bool [{len(log_probs)}], not {mask.dtype} {tuple(mask.shape)}")
        log_probs = log_probs.masked_fill(~mask[:, None], -torch.inf)
    # torch.where before the product: 0 * inf would be NaN, in the value and in the gradient.
    gap = torch.where(log_probs.isneginf(), torch.zeros_like(log_probs), log_probs - ref_log_probs.detach())
    return (log_probs.exp() * gap).sum(1)


def kl_reward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float, estimator: str) -> Tensor:
    """The KL penalty as reward of each token: -beta * estimate, float64 [T], detached, 0 where masked.

    PPO for language models (Ziegler et al., arXiv:1909.08593, eq. 2; Ouyang et al., arXiv:2203.02155, eq. 2): the sum
    over a completion is -beta ln(policy / reference) of the whole of it, so nothing is divided by its length. They use
    k1, the only estimate whose expected policy gradient is that of KL(policy || reference); see `kl_estimate`.

    logprobs: float [T], of the policy that sampled; ref_logprobs: float [T]; mask: bool [T].
    """
    check_columns(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    penalty = -beta * kl_estimate(logprobs.detach().double(), ref_logprobs.detach().double(), estimator)
    return torch.where(mask, penalty, torch.zeros_like(penalty))


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
