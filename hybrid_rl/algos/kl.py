"""The KL penalty against the reference: estimates from one sampled token each, the exact divergence over the
vocabulary, the penalty as a reward, the weight that follows it, and the records (none, in the loss, in the reward)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.columns import at_least_float32, bounded, check_columns
from hybrid_rl.algos.interface import KLTerm, register
from hybrid_rl.algos.options import key
from hybrid_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3", "abs")
MAX_ERROR = 0.2  # of the measured KL against its target, in one step


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token, for tokens sampled from the policy. Float [T], natural logs.

    With r = reference / policy (J. Schulman, "Approximating KL divergence", 2020):

    - k1 = -ln r: unbiased, may be negative
    - k2 = (ln r)^2 / 2: biased, never negative
    - k3 = r - 1 - ln r: unbiased, never negative; ln r above 20 counts as 20, in value and slope (`bounded`)
    - abs = |ln r|: not a KL; its mean is at least the KL

    What minimising one does does not follow from its value. Expected gradients over tokens of the policy, as a loss, as
    a loss times policy / old with its gradient (tokens of an older policy), and as a detached penalty in the reward:

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
    """Compute KL(policy || reference) at each place, sum over the vocabulary of p (ln p - ln p_ref): float [T].

    Its gradient is that of KL(policy || reference) at this place, by whatever policy the tokens were sampled: no
    importance weight belongs on it. The effect of a token on the places after it is left out, as with every penalty
    in the loss.

    log_probs: float [T, V] with gradient, natural logs, normalised; ref_log_probs: [T, V], taken as constant. Tokens
    that the policy cannot make (ln p = -inf) count 0; if only the reference excludes a token the KL is inf. mask:
    bool [T]; where it is False the KL is 0 without gradient, whatever the values are.
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
    """Compute the KL penalty as a reward of each token: -beta * estimate, float64 [T], detached, 0 where masked.

    PPO for language models (Ziegler et al., arXiv:1909.08593, eq. 2; Ouyang et al., arXiv:2203.02155, eq. 2): the sum
    over a completion is -beta ln(policy / reference) of the whole of it, so nothing is divided by its length. They use
    k1, the only estimate whose expected policy gradient is that of KL(policy || reference); see `kl_estimate`.

    logprobs: float [T], of the policy that sampled; ref_logprobs: float [T]; mask: bool [T].
    """
    check_columns(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    penalty = -beta * kl_estimate(logprobs.detach().double(), ref_logprobs.detach().double(), estimator)
    return torch.where(mask, penalty, torch.zeros_like(penalty))


def next_beta(beta: float, measured: float, *, target: float | None, horizon: int, num_samples: int) -> float:
    """Return the weight of a KL penalty after a training step (Ziegler et al., arXiv:1909.08593, section 2.2).

    error = clip(measured / target - 1, -0.2, 0.2); beta <- beta * (1 + error * num_samples / horizon). The paper writes
    K_beta = 0.1 per batch for num_samples / horizon; its code has a horizon of 10000 samples. target: in the unit of
    `measured` (the paper: nats per completion); None = fixed, beta stays. measured: the KL of this step, by k1 perhaps
    negative. num_samples: completions of the step, over all ranks. Raises ValueError if `measured` is not a number, and
    for a horizon of at most MAX_ERROR * num_samples, with which beta could fall to 0 and stay there.
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
            f"horizon={horizon} samples is so short that one step of {num_samples} samples could end the penalty; "
            f"use more than {num_samples * MAX_ERROR:g}"
        )
    error = min(max(measured / target - 1, -MAX_ERROR), MAX_ERROR)
    return beta * (1 + error * num_samples / horizon)


_PLACE = "where the KL penalty against the reference is added: none, loss or reward"


@register
@dataclass(frozen=True)
class NoKL(KLTerm):
    """No reference model."""

    kl_in: Literal["none"] = key("none", _PLACE)
    beta: float = key(
        0.0,
        "weight of the KL penalty; above 0 sets kl_in=loss",
        minimum=0,
        maximum=0,
        remedy="with kl=none there is no KL penalty; leave kl out, or choose kl=loss or kl=reward",
    )


@dataclass(frozen=True)
class _Weighted(KLTerm):
    """Base of both penalties."""

    beta: float = key(0.04, "weight of the KL penalty; with kl_target its start", above=0)
    kl_target: float | None = key(
        None, "adaptive weight: beta follows the measured KL per completion to this; None = fixed", above=0
    )
    kl_horizon: int = key(10000, "adaptive weight: samples over which beta moves by one unit of error", minimum=1)
    reference_reset_steps: int | None = key(
        None, "every n training steps the policy becomes the new reference; None = never (ProRL)", minimum=1
    )

    ref_model_sync_steps: int | None = key(
        None, "every n training steps the reference moves towards the policy; None = never (TRL: 512)", minimum=1
    )
    ref_model_mixup_alpha: float = key(
        0.6, "the share of the policy in the reference that ref_model_sync_steps makes", above=0, maximum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_reset_steps is not None and self.ref_model_sync_steps is not None:
            raise ConfigError(
                f"reference_reset_steps={self.reference_reset_steps} and ref_model_sync_steps="
                f"{self.ref_model_sync_steps} both move the reference, the first with a new start of the optimizer; "
                "leave one of them out"
            )

    @property
    def inert_options(self) -> Mapping[str, str]:
        """kl_horizon without a target, ref_model_mixup_alpha without steps."""
        reasons = {} if self.kl_target is not None else {"kl_horizon": "beta is fixed; set kl_target"}
        if self.ref_model_sync_steps is None:
            reasons["ref_model_mixup_alpha"] = "the reference does not move; set ref_model_sync_steps"
        return reasons

    @property
    def moves_reference(self) -> str:
        """The key, with its value, that moves the reference during training; empty if it stays as it was."""
        for name in ("reference_reset_steps", "ref_model_sync_steps"):
            if getattr(self, name) is not None:
                return f"{name}={getattr(self, name)}"
        return ""


@register
@dataclass(frozen=True)
class KLInLoss(_Weighted):
    """beta * KL(policy || reference) added to the policy loss (GRPO, arXiv:2402.03300, eq. 3 and 4: k3, beta =
    0.04)."""

    kl_in: Literal["loss"] = key("loss", _PLACE)
    kl_estimator: Literal["k2", "k3", "abs", "exact"] = key(
        "k3", "KL estimate in the loss; k1 is not offered: its gradient is zero in expectation"
    )
    use_bias_correction_kl: bool = key(
        True, "weight the KL term by the importance ratio: right for samples of an older policy (DeepSeek-V3.2)"
    )
    in_loss = True


@register
@dataclass(frozen=True)
class KLInReward(_Weighted):
    """-beta * KL at every token, as part of its reward (PPO for language models, arXiv:1909.08593, eq. 2)."""

    kl_in: Literal["reward"] = key("reward", _PLACE)
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = key(
        "k1", "KL estimate in the reward; only k1 has the gradient of KL(policy || reference)"
    )
    in_reward = True
