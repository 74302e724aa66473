"""SimKO: at forking tokens a correct sample lifts the best candidates, a wrong one punishes the best one more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns, ratio_of
from hybrid_rl.algos.inputs import LossInputs, PolicyLoss
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.records import PolicyObjective
from hybrid_rl.options import key


@dataclass(frozen=True)
class SimKO(PolicyObjective):
    """Simple pass@K Optimization, arXiv:2510.14807: against the concentration of all probability on one candidate."""

    objective: Literal["simko"] = key("simko", "the policy loss")
    epsilon: float = key(0.2, "ratio clip below 1", above=0, maximum=1)
    epsilon_high: float | None = key(None, "ratio clip above 1; None = epsilon", above=0)
    num_candidates: int = key(3, "candidates that correct samples lift (K)", minimum=1)
    mix_topk_coef: float = key(0.01, "share of the gradient that goes to them (alpha)", minimum=0, maximum=1)
    lambda_top1: float = key(1.1, "weight of wrong samples where they took the best candidate", minimum=1)
    forking_quantile: float = key(
        0.8, "tokens are forking above this quantile of the entropy within their sample (tau)", minimum=0, below=1
    )
    needs = frozenset({"log_probs"})

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """See PolicyObjective."""
        if inputs.log_probs is None or inputs.token_ids is None:
            raise ValueError("objective=simko needs log_probs and token_ids; compute the whole vocabulary")
        threshold = row_quantile(inputs.entropy, inputs.mask, inputs.rows, inputs.num_rows, self.forking_quantile)
        return simko_policy_loss(
            inputs.log_ratio,
            inputs.advantages,
            inputs.log_probs,
            inputs.token_ids,
            inputs.mask & (inputs.entropy.detach() > threshold[inputs.rows]),
            epsilon=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            num_candidates=self.num_candidates,
            mix_topk_coef=self.mix_topk_coef,
            lambda_top1=self.lambda_top1,
        )


def simko_policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    log_probs: Tensor,
    token_ids: Tensor,
    forking: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
    num_candidates: int,
    mix_topk_coef: float,
    lambda_top1: float,
) -> PolicyLoss:
    """PPO's clipped surrogate with another ratio at forking tokens. arXiv:2510.14807.

    Correct samples (A > 0), r the ratio of the sampled token, r_k that of the k-th best candidate:
    (1 - alpha) r + alpha / K * sum over k of sg(r / r_k) r_k. Its value is r, and its gradient is r times that of
    (1 - alpha) ln p + alpha / K * sum over k of ln p_k: the old policy's view of the candidates cancels. Wrong samples
    (A < 0) whose token is the best candidate itself: lambda_top1 * A for A. The candidates are those of the present
    policy. It is no entropy bonus: tokens that do not fork, and wrong tokens that are not the best, learn as in PPO.
    The paper knows correct from wrong by a binary reward; here the sign of the advantage says it. Which tokens fork it
    leaves to a threshold of the entropy; SimKO follows its authors' code, a quantile within each sample.

    log_ratio: float [T], with gradient; advantages: float [T]; log_probs: float [T, V], with gradient; token_ids: int64
    [T]; forking: bool [T].
    """
    check_columns(log_ratio=log_ratio, advantages=advantages, token_ids=token_ids, forking=forking)
    if log_probs.dim() != 2 or len(log_probs) != len(log_ratio):
        raise ValueError(f"log_probs must be [{len(log_ratio)}, V], not {tuple(log_probs.shape)}")
    if num_candidates > log_probs.shape[1]:
        raise ValueError(f"num_candidates={num_candidates} is more than the vocabulary of {log_probs.shape[1]} tokens")
    advantages = advantages.detach()
    candidates = log_probs.detach().topk(num_candidates, dim=1).indices
    smoothed = forking & (advantages > 0)
    punished = forking & (advantages < 0) & (token_ids == candidates[:, 0])
    lifted = log_probs.gather(1, candidates).mean(1)
    log_surrogate = torch.where(
        smoothed,
        # The value of log_ratio, with a gradient of both terms.
        log_ratio - mix_topk_coef * (log_ratio - log_ratio.detach()) + mix_topk_coef * (lifted - lifted.detach()),
        log_ratio,
    )
    ratio = ratio_of(log_surrogate)
    detached = ratio.detach()
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    scaled = torch.where(punished, lambda_top1 * advantages, advantages)
    return PolicyLoss(
        per_token=-torch.minimum(ratio * scaled, bounded * scaled),
        weight=ratio_of(log_ratio),
        ratio=detached,
        clipped_low=(detached < 1 - epsilon) & (advantages < 0),
        clipped_high=(detached > 1 + epsilon_high) & (advantages > 0),
        metrics={
            "simko/smoothed_share": smoothed.to(detached.dtype),
            "simko/punished_share": punished.to(detached.dtype),
        },
    )


def row_quantile(values: Tensor, mask: Tensor, rows: Tensor, num_rows: int, quantile: float) -> Tensor:
    """Quantile of `values` [T] over the unmasked tokens of each sample, [num_rows], detached, interpolated linearly
    between neighbours; inf for a sample without any. rows: int64 [T]; mask: bool [T]."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile={quantile} is no quantile; use 0 to 1")
    if not len(values):
        return values.new_full((num_rows,), torch.inf)
    # Sample after sample, unmasked tokens first, each ascending. No shape here depends on the mask: on a GPU finding it
    # out would hold up the host.
    values = values.detach()
    order = values.argsort()
    order = order[(2 * rows + ~mask)[order].argsort(stable=True)]
    values = values[order]
    totals, counts = (row_sum(column.long(), rows, num_rows) for column in (torch.ones_like(mask), mask))
    place = quantile * (counts - 1).clamp(min=0).double()
    first = (totals.cumsum(0) - totals).clamp(max=len(values) - 1)  # of a sample without tokens it is never used
    low, high = values[first + place.floor().long()], values[first + place.ceil().long()]
    found = low + (high - low) * place.frac().to(values.dtype)
    return torch.where(counts > 0, found, torch.inf)
