"""Clip-Cov and KL-Cov: the few tokens that make entropy collapse lose their gradient, or pay a KL penalty.

A policy gradient changes the entropy by about minus the covariance of ln p and advantage ("The Entropy Mechanism of
Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617), and a small share of tokens causes most of
it. Both methods choose tokens by their part in it. The paper takes the present policy's logprobs; here they are those
at the start of the training step, equal in its first update, because the choice is made over the whole mini-batch of
all ranks before it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.columns import check_columns, ratio_of
from hybrid_rl.algos.interface import LossInputs, Needs, PolicyLoss, PolicyObjective, WholeMiniBatch, own, register
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.options import key
from hybrid_rl.algos.policy_losses.clip import ClipRange
from hybrid_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class ClipCov(ClipRange):
    """Clip-Cov: clip's loss, without gradient for tokens drawn from those whose covariance is between two bounds.

    arXiv:2505.22617. The covariance of a token is `(ln p_old - mean)(A - mean)`; the paper takes the present p, which
    is the same in the first update. The ratio is not bounded below, and by 2 above. The tokens that are drawn count as
    clipped.
    """

    objective: Literal["clip_cov"] = key("clip_cov", "the policy loss")
    follows_advantages = True
    epsilon: float = key(1.0, "ratio clip below 1; 1 = none", above=0, maximum=1)
    clip_cov_ratio: float = own(2e-4, "share of tokens without gradient", above=0, maximum=1)
    clip_cov_lb: float = own(1.0, "covariance above which a token may be drawn")
    clip_cov_ub: float = own(5.0, "covariance below which a token may be drawn")
    needs = frozenset({Needs.OLD_LOGPROBS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ConfigError(
                f"clip_cov_lb={self.clip_cov_lb} must be below clip_cov_ub={self.clip_cov_ub}: no token is between"
            )

    def prepare(self, whole: WholeMiniBatch) -> Tensor:
        """Draw the tokens without gradient: 1 for them, float32 [T]."""
        return draw_by_covariance(
            whole, ratio=self.clip_cov_ratio, lower=self.clip_cov_lb, upper=self.clip_cov_ub
        ).float()

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the clipped surrogate, 0 at the tokens that were drawn."""
        advantages, selected = inputs.advantages.detach(), _selected(inputs)
        kept, ratio = inputs.kept(advantages), ratio_of(inputs.log_ratio)
        per_token = -torch.minimum(ratio * kept, ratio.clamp(*self.bounds) * kept)
        loss = self.noted(torch.where(selected, torch.zeros_like(per_token), per_token), ratio, kept)
        return replace(
            loss,
            clipped_low=loss.clipped_low | (selected & (advantages < 0)),
            clipped_high=loss.clipped_high | (selected & (advantages > 0)),
            metrics={"covariance/selected_share": selected.to(loss.ratio.dtype)},
        )


@register
@dataclass(frozen=True)
class KLCov(PolicyObjective):
    """KL-Cov: `-w A`, and + coef * abs(ln w) for the share of tokens with the highest covariance, without a clip.

    arXiv:2505.22617. The paper writes KL(old, policy) for the penalty without an estimate of it; abs(ln w) is what its
    authors' code takes. The penalty's gradient is 0 at ratio 1, that is, in the first update of a training step.
    """

    objective: Literal["kl_cov"] = key("kl_cov", "the policy loss")
    kl_cov_ratio: float = own(
        2e-3, "share of tokens with a penalty (32B models in the paper: 2e-4)", above=0, maximum=1
    )
    kl_cov_coef: float = own(1.0, "weight of the penalty", minimum=0)
    needs = frozenset({Needs.OLD_LOGPROBS})

    def prepare(self, whole: WholeMiniBatch) -> Tensor:
        """Choose the tokens with a penalty: 1 for them, float32 [T]."""
        return highest_covariance(whole, ratio=self.kl_cov_ratio).float()

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the unclipped surrogate with the penalty."""
        log_ratio, selected = inputs.log_ratio, _selected(inputs) & inputs.mask
        ratio = ratio_of(log_ratio)
        penalty = torch.where(selected, self.kl_cov_coef * log_ratio.abs(), torch.zeros_like(log_ratio))
        per_token = -ratio * inputs.advantages.detach() + penalty
        return PolicyLoss.unclipped(per_token, ratio, {"covariance/selected_share": selected.to(ratio.dtype)})


def draw_by_covariance(whole: WholeMiniBatch, *, ratio: float, lower: float, upper: float) -> Tensor:
    """Draw tokens at random from those whose covariance is between `lower` and `upper`: bool [T].

    As many as `ratio` of all unmasked tokens, rounded down, at least one, or as there are. Which ones depends on the
    seed and on what the samples hold, not on their order. The authors' code leaves out tokens that the ratio clip
    stops: in the first update there are none, and later ones are not known when the choice is made.
    """
    covariance = token_covariance(whole.old_logprobs, whole.advantages, whole.mask)
    candidates = (whole.mask & (covariance > lower) & (covariance < upper)).nonzero()[:, 0]
    order = token_keys(whole)[candidates].argsort(stable=True)
    return _first(whole, candidates[order], ratio)


def highest_covariance(whole: WholeMiniBatch, *, ratio: float) -> Tensor:
    """Find the tokens with the highest covariance: bool [T]. As many as `ratio` of all unmasked tokens, rounded down,
    at least one. Ties are broken by the seed and by what the samples hold, not by their order."""
    candidates = whole.mask.nonzero()[:, 0]
    candidates = candidates[token_keys(whole)[candidates].argsort(stable=True)]
    covariance = token_covariance(whole.old_logprobs, whole.advantages, whole.mask)[candidates]
    order = covariance.argsort(descending=True, stable=True)
    return _first(whole, candidates[order], ratio)


def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute (ln p - mean ln p) * (A - mean A) of each token, means over the unmasked tokens: float64 [T], 0 where
    masked.

    logprobs, advantages: float [T]; mask: bool [T].
    """
    check_columns(logprobs=logprobs, advantages=advantages, mask=mask)
    product = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    product[mask] = _centred(logprobs[mask]) * _centred(advantages[mask])
    return product


def token_keys(whole: WholeMiniBatch) -> Tensor:
    """Return a pseudo-random number of each token, int64 [T], from the seed, its position in its sample and the
    logprobs and advantages of that sample: the same however samples are ordered, and whatever masked tokens are between
    the others, which alone count as positions. Tokens of samples that are equal throughout share it; others share it
    only by accident."""
    zeros = torch.zeros_like(whole.rows)
    first = torch.full((whole.num_rows,), len(whole.rows), dtype=torch.int64, device=whole.rows.device)
    places = torch.arange(len(whole.rows), device=whole.rows.device)
    begins = first.scatter_reduce(0, whole.rows, places, "amin")[whole.rows]
    before = whole.mask.cumsum(0) - whole.mask.long()
    content = torch.zeros_like(whole.rows)
    for column in (_bits(whole.old_logprobs), _bits(whole.advantages)):
        content = _mix(content) + torch.where(whole.mask, column, zeros)
    content = torch.where(whole.mask, _mix(_mix(content) + before - before[begins]), zeros)
    samples = row_sum(content, whole.rows, whole.num_rows)[whole.rows]
    return _mix(_mix(_mix(samples) + content) + whole.seed % (1 << 63))


def _selected(inputs: LossInputs) -> Tensor:
    """Return the tokens that `prepare` chose, bool [T]."""
    prepared = inputs.needed("prepared")
    check_columns(mask=inputs.mask, prepared=prepared)
    return prepared > 0


def _first(whole: WholeMiniBatch, tokens: Tensor, ratio: float) -> Tensor:
    """Flag the first of these tokens, bool [T]: as many as `ratio` of all unmasked ones, rounded down, at least one."""
    count = max(1, int(ratio * int(whole.mask.sum())))
    return torch.zeros_like(whole.mask).index_fill(0, tokens[:count], True)


def _centred(values: Tensor) -> Tensor:
    # Sorted before they are summed: the mean is the same, to the last bit, in every order of the samples.
    values = values.double()
    return values - values.sort().values.sum() / max(len(values), 1)


def _bits(values: Tensor) -> Tensor:
    return values.detach().double().view(torch.int64)


def _mix(bits: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 on int64: every bit of the result depends on every bit of the argument."""
    bits = (bits ^ _shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    bits = (bits ^ _shifted(bits, 27)) * (0x94D049BB133111EB - (1 << 64))
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift logically to the right."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
