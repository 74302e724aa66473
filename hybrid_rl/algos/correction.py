"""Correction of what the engine sampled to what the trainer computes: weights of tokens in the policy loss.

The engine samples from pi_rollout; the trainer, before any update of the step, computes pi_old for the same weights or
newer ones. Ratios here are pi_old / pi_rollout, of a token or of a completion; the ratio policy / pi_old, which has the
gradient and is clipped, is the policy loss's. Tokens that are left out still count in the denominators of the loss, as
in TRL; verl takes them out of its mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from hybrid_rl.algos.columns import check_columns, ratio_of
from hybrid_rl.algos.interface import Record, register
from hybrid_rl.algos.kl import kl_estimate
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.options import key

if TYPE_CHECKING:
    from torch import Tensor

_MODE = "how the gap between engine and trainer is corrected"
_LEVEL = "ratio of a token, of the completion (product), or the geometric mean of its tokens"
_LOW = "smallest ratio: tis takes smaller ones for this, mis and icepop leave them out; 0 = no bound"
_HIGH = "largest ratio: tis and kl_rejection take larger ones for this, mis and icepop leave them out"
_VETO = "also leave out a completion that has a token with a ratio below this (verl: 1e-4); None = off"


@dataclass(frozen=True)
class CorrectionInputs:
    """T completion tokens of whole samples. logprobs: float [T], of the learner at the start of the training step,
    detached; rollout_logprobs: float [T], of the engine; mask: bool [T]; rows: int64 [T], in 0..num_rows-1; ages: int64
    [T], policy versions between the token and the learner, 0 if it is fresh."""

    logprobs: Tensor
    rollout_logprobs: Tensor
    mask: Tensor
    rows: Tensor
    num_rows: int
    ages: Tensor

    def __post_init__(self) -> None:
        check_columns(**{name: column for name, column in vars(self).items() if name != "num_rows"})


@dataclass(frozen=True)
class Corrected:
    """weights: float [T], detached, of each token in the policy loss, 0 where masked. rejected: bool [T], tokens in the
    mask that it leaves out; truncated: bool [T], tokens in the mask whose ratio it bounded."""

    weights: Tensor
    rejected: Tensor
    truncated: Tensor


def importance_ratio(inputs: CorrectionInputs, *, level: str) -> Tensor:
    """Return pi_old / pi_rollout, float64 [T], detached; 1 for a masked token at level "token".

    - "token": of each token
    - "sequence": the product over the unmasked tokens of its completion, the same at all of them
    - "geometric": its n-th root over these n tokens, exp of the mean of the logs

    The product is the only unbiased one for whole completions; its spread grows with their length. At most e^20
    (`ratio_of`); NaN if both policies say that the token is impossible. Raises ValueError for another level.
    """
    mask, rows, num_rows = inputs.mask, inputs.rows, inputs.num_rows
    gap = inputs.logprobs.detach().double() - inputs.rollout_logprobs.detach().double()
    log_ratio = torch.where(mask, gap, torch.zeros_like(gap))
    if level == "token":
        return ratio_of(log_ratio)
    total = row_sum(log_ratio, rows, num_rows)
    if level == "sequence":
        return ratio_of(total)[rows]
    if level == "geometric":
        return ratio_of(total / row_sum(mask.double(), rows, num_rows).clamp(min=1))[rows]
    raise ValueError(f"level={level!r} is unknown; use token, sequence or geometric")


def truncated_weights(ratio: Tensor, mask: Tensor, *, cap: float, floor: float = 0.0) -> Corrected:
    """Truncate importance weights: min(max(ratio, floor), cap). It zeroes nothing but a ratio that is not a number,
    which counts as rejected. ratio: float [T]; mask: bool [T]."""
    check_columns(ratio=ratio, mask=mask)
    kept = mask & ~ratio.isnan()
    weights = torch.where(kept, ratio.clamp(floor, cap), torch.zeros_like(ratio))
    return Corrected(weights, mask & ~kept, mask & ((ratio > cap) | (ratio < floor)))


def masked_weights(ratio: Tensor, mask: Tensor, *, low: float, high: float) -> Corrected:
    """Mask importance weights: the ratio itself if low <= ratio <= high, else 0. A ratio that is not a
    number counts as outside. ratio: float [T]; mask: bool [T]."""
    check_columns(ratio=ratio, mask=mask)
    kept = mask & (ratio >= low) & (ratio <= high)
    return Corrected(torch.where(kept, ratio, torch.zeros_like(ratio)), mask & ~kept, torch.zeros_like(mask))


def mean_divergence(inputs: CorrectionInputs, *, estimator: str) -> Tensor:
    """Estimate KL(pi_rollout || pi_old) per token of each completion, float64 [num_rows], 0 for one without tokens.

    The absolute value of the mean of `kl_estimate` over its unmasked tokens, which the engine sampled: with k1 this is
    |ln of the geometric mean of the ratios|.
    """
    mask, rows, num_rows = inputs.mask, inputs.rows, inputs.num_rows
    estimate = kl_estimate(inputs.rollout_logprobs.detach().double(), inputs.logprobs.detach().double(), estimator)
    total = row_sum(torch.where(mask, estimate, torch.zeros_like(estimate)), rows, num_rows)
    return total.abs() / row_sum(mask.double(), rows, num_rows).clamp(min=1)


def leave_out(found: Corrected, which: Tensor, mask: Tensor) -> Corrected:
    """Return `found` without the tokens `which`, bool [T]: their weight is 0, and they are rejected."""
    check_columns(weights=found.weights, which=which, mask=mask)
    return Corrected(found.weights.masked_fill(which, 0), found.rejected | (mask & which), found.truncated & ~which)


def vetoed(inputs: CorrectionInputs, *, veto: float) -> Tensor:
    """Return the tokens of all completions that have an unmasked token with a ratio below `veto`, bool [T]."""
    is_bad = inputs.mask & (importance_ratio(inputs, level="token") < veto)
    return (row_sum(is_bad.double(), inputs.rows, inputs.num_rows) > 0)[inputs.rows]


@dataclass(frozen=True)
class Correction(Record):
    """Base of the corrections. is_active: False if it does nothing."""

    correction_mode: str = key("", _MODE)
    is_active: ClassVar[bool] = True

    def weigh(self, inputs: CorrectionInputs) -> Corrected:
        """Return the weights of all tokens."""
        raise NotImplementedError


@register
@dataclass(frozen=True)
class NoCorrection(Correction):
    """The engine's samples are used as if the trainer had made them."""

    correction_mode: Literal["none"] = key("none", _MODE)
    is_active = False


@dataclass(frozen=True)
class _Weighing(Correction):
    """Base of the corrections that weigh tokens: older ones may count less, by a factor per policy version (a plain
    discount, not from a paper)."""

    staleness_decay: float = key(
        1.0, "factor on a token's weight for each policy version it lags behind; 1 = off", above=0, maximum=1
    )

    def weigh(self, inputs: CorrectionInputs) -> Corrected:
        """Return the weights of all tokens, in the dtype of the logprobs."""
        corrected = self._weigh(inputs)
        weights = corrected.weights * self.staleness_decay ** inputs.ages.clamp(min=0).double()
        return replace(corrected, weights=weights.to(inputs.logprobs.dtype))

    def _weigh(self, inputs: CorrectionInputs) -> Corrected:
        """Return the weights before they decay, float64."""
        raise NotImplementedError

    def _veto(self, found: Corrected, inputs: CorrectionInputs, veto: float | None) -> Corrected:
        return found if veto is None else leave_out(found, vetoed(inputs, veto=veto), inputs.mask)


@register
@dataclass(frozen=True)
class TruncatedImportanceSampling(_Weighing):
    """Truncated importance sampling: `min(max(q, low), high)`, detached, q = p_old / p_roll.

    F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025: per token, high = 2.
    The lower bound is TRL's (`vllm_importance_sampling_clip_min`). For the ratio of a completion verl says 2 to 10 and
    TRL has 3; for the geometric mean it must be near 1 to do anything.
    """

    correction_mode: Literal["tis"] = key("tis", _MODE)
    correction_level: Literal["token", "sequence", "geometric"] = key("token", _LEVEL)
    correction_low: float = key(0.0, _LOW, minimum=0, maximum=1)
    correction_high: float = key(2.0, _HIGH, minimum=1)

    def _weigh(self, inputs: CorrectionInputs) -> Corrected:
        ratio = importance_ratio(inputs, level=self.correction_level)
        return truncated_weights(ratio, inputs.mask, cap=self.correction_high, floor=self.correction_low)


@register
@dataclass(frozen=True)
class MaskedImportanceSampling(_Weighing):
    """Masked importance sampling: q if low <= q <= high, else 0.

    J. Liu, Y. Li et al., "When speed kills stability", 2025. They bound the product over a completion from above only
    (correction_low=0 here; so does TRL); verl's preset has 0.5 and 2.
    """

    correction_mode: Literal["mis"] = key("mis", _MODE)
    correction_level: Literal["token", "sequence", "geometric"] = key("sequence", _LEVEL)
    correction_low: float = key(0.5, _LOW, minimum=0, maximum=1)
    correction_high: float = key(2.0, _HIGH, minimum=1)
    correction_veto: float | None = key(None, _VETO, above=0, below=1)

    def _weigh(self, inputs: CorrectionInputs) -> Corrected:
        ratio = importance_ratio(inputs, level=self.correction_level)
        corrected = masked_weights(ratio, inputs.mask, low=self.correction_low, high=self.correction_high)
        return self._veto(corrected, inputs, self.correction_veto)


@register
@dataclass(frozen=True)
class IcePop(_Weighing):
    """As `mis`, token by token, within [0.5, 5]: M(k) of IcePop (Ring-1T, arXiv:2510.18855)."""

    correction_mode: Literal["icepop"] = key("icepop", _MODE)
    correction_low: float = key(0.5, _LOW, minimum=0, maximum=1)
    correction_high: float = key(5.0, _HIGH, minimum=1)

    def _weigh(self, inputs: CorrectionInputs) -> Corrected:
        ratio = importance_ratio(inputs, level="token")
        return masked_weights(ratio, inputs.mask, low=self.correction_low, high=self.correction_high)


@register
@dataclass(frozen=True)
class KLRejection(_Weighing):
    """0 for completions whose KL(engine, trainer) per token is above a threshold; the others have weight 1, or `min(q,
    high)`.

    verl's rollout correction (Y. Li et al.): its preset of k3 has 0.01, that of k1, the geometric mean, 0.001.
    """

    correction_mode: Literal["kl_rejection"] = key("kl_rejection", _MODE)
    correction_estimator: Literal["k1", "k3", "abs"] = key(
        "k3", "KL(engine || trainer) per token of a completion; k1 = |ln of the geometric mean of its ratios|"
    )
    correction_threshold: float = key(0.01, "completions above this are left out, nats per token", above=0)
    correction_high: float | None = key(None, f"{_HIGH}; None = weight 1", minimum=1)
    correction_veto: float | None = key(None, _VETO, above=0, below=1)

    def _weigh(self, inputs: CorrectionInputs) -> Corrected:
        divergence = mean_divergence(inputs, estimator=self.correction_estimator)
        if self.correction_high is None:
            none = torch.zeros_like(inputs.mask)
            corrected = Corrected(inputs.mask.double(), none, none)
        else:
            ratio = importance_ratio(inputs, level="token")
            corrected = truncated_weights(ratio, inputs.mask, cap=self.correction_high)
        # Not `>`: a divergence that is not a number is left out.
        corrected = leave_out(corrected, ~(divergence <= self.correction_threshold)[inputs.rows], inputs.mask)
        return self._veto(corrected, inputs, self.correction_veto)
