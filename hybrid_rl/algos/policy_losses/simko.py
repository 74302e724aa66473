"""SimKO: at forking tokens a correct sample lifts the best candidates, a wrong one punishes the best one more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.columns import ratio_of
from hybrid_rl.algos.interface import LossInputs, Needs, PolicyLoss, own, register
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.options import key
from hybrid_rl.algos.policy_losses.clip import ClipRange

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class SimKO(ClipRange):
    """Simple pass@K optimisation: clip's loss; at forking tokens with A > 0 the ratio has the gradient of `(1 - alpha)
    ln p + alpha / K * sum of the K best ln p_k`, with A < 0 on the best token A is multiplied by `lambda_top1`.

    arXiv:2510.14807, against the concentration of all probability on one candidate. For a correct sample (A > 0), w the
    ratio of the sampled token, w_k that of the k-th best candidate: (1 - alpha) w + alpha / K * sum over k of
    sg(w / w_k) w_k. Its value is w, and the old policy's view of the candidates cancels. The candidates are those of
    the present policy. It is not an entropy bonus: tokens that do not fork, and wrong tokens that are not the best,
    learn as in PPO. The paper knows correct from wrong by a binary reward; here the sign of the advantage says it.
    Which tokens fork it leaves to a threshold of the entropy; this follows its authors' code, a quantile within each
    sample.
    """

    objective: Literal["simko"] = key("simko", "the policy loss")
    follows_advantages = True
    num_candidates: int = own(3, "number of top candidates that correct samples raise (K)", minimum=1)
    mix_topk_coef: float = own(0.01, "share of the gradient that goes to them (alpha)", minimum=0, maximum=1)
    lambda_top1: float = own(1.1, "weight of wrong samples that took the best candidate", minimum=1)
    forking_quantile: float = own(
        0.8, "tokens are forking above this quantile of the entropy within their sample (tau)", minimum=0, below=1
    )
    needs = frozenset({Needs.LOG_PROBS})

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the clipped surrogate; the metrics are the shares of tokens that were smoothed and punished."""
        log_ratio, advantages = inputs.log_ratio, inputs.advantages.detach()
        log_probs, token_ids = inputs.needed("log_probs"), inputs.needed("token_ids")
        entropy = inputs.needed("entropy").detach()
        if log_probs.dim() != 2 or len(log_probs) != len(log_ratio):
            raise ValueError(f"log_probs must be [{len(log_ratio)}, V], not {tuple(log_probs.shape)}")
        if self.num_candidates > log_probs.shape[1]:
            raise ValueError(
                f"num_candidates={self.num_candidates} is more than the vocabulary of {log_probs.shape[1]} tokens"
            )
        threshold = row_quantile(entropy, inputs.mask, inputs.rows, inputs.num_rows, self.forking_quantile)
        forking = inputs.mask & (entropy > threshold[inputs.rows])
        candidates = log_probs.detach().topk(self.num_candidates, dim=1).indices
        smoothed = forking & (advantages > 0)
        punished = forking & (advantages < 0) & (token_ids == candidates[:, 0])
        lifted, alpha = log_probs.gather(1, candidates).mean(1), self.mix_topk_coef
        # The value of log_ratio, with a gradient of both terms.
        mixed = log_ratio - alpha * (log_ratio - log_ratio.detach()) + alpha * (lifted - lifted.detach())
        scaled = torch.where(punished, self.lambda_top1 * advantages, advantages)
        ratio = ratio_of(torch.where(smoothed, mixed, log_ratio))
        loss = self.noted(-torch.minimum(ratio * scaled, ratio.clamp(*self.bounds) * scaled), ratio, scaled)
        shares = {"simko/smoothed_share": smoothed, "simko/punished_share": punished}
        metrics = {name: which.to(loss.ratio.dtype) for name, which in shares.items()}
        return replace(loss, weight=ratio_of(log_ratio), metrics=metrics)


def row_quantile(values: Tensor, mask: Tensor, rows: Tensor, num_rows: int, quantile: float) -> Tensor:
    """Return a quantile (0 to 1) of `values` [T] over the unmasked tokens of each sample, [num_rows], detached,
    interpolated linearly between neighbours; inf for a sample without any. rows: int64 [T]; mask: bool [T]."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile={quantile} is not a quantile; use 0 to 1")
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
    quantiles = low + (high - low) * place.frac().to(values.dtype)
    return torch.where(counts > 0, quantiles, torch.inf)
