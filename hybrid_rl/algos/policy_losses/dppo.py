"""DPPO: a trust region by the divergence of distributions, instead of a clip of the sampled token's ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybrid_rl.algos.columns import bounded, check_columns, masked_log_ratio
from hybrid_rl.algos.interface import LossInputs, Needs, PolicyLoss, PolicyObjective, own, register
from hybrid_rl.algos.options import key

if TYPE_CHECKING:
    from torch import Tensor

# Smallest probability of "everything else": a difference of float32 probabilities resolves none below it.
REST_FLOOR = 1e-12
# The paper's thresholds, appendix C.1. Its larger runs took 0.2 for the binary TV (appendix E).
THRESHOLDS = {"tv": 0.15, "kl": 0.05}


@register
@dataclass(frozen=True)
class DPPO(PolicyObjective):
    """Divergence proximal policy optimisation: `-M min(w, C) A`, with M = 0 where the update leaves the trust region,
    (A > 0 and w > 1, or A < 0 and w < 1) and D(old, p) > threshold, and 1 elsewhere.

    arXiv:2602.04879, eq. 12 (objective and mask), eq. 23 (C), eqs. 13 to 16 (D): updates that lead back to the old
    policy are never stopped. The weight min(w, C) is detached and multiplies the gradient of ln p; without C the
    gradient is that of -M w A. The binary divergences compare with the engine that sampled, as the paper asks for
    (section 5.2): their w is policy / engine, so that they take no further correction of the engine's samples. The
    top-k divergences compare with the learner at the start of the training step, since engines do not report their best
    tokens.
    """

    objective: Literal["dppo"] = key("dppo", "the policy loss")
    follows_advantages = True
    divergence_type: Literal["binary_tv", "binary_kl", "topk_tv", "topk_kl"] = own(
        "binary_tv", "total variation or KL, from the sampled token only, or from the best tokens of the old policy too"
    )
    divergence_threshold: float | None = own(
        None, "divergence from which updates away from the old policy stop; None = 0.15 for TV, 0.05 for KL", above=0
    )
    num_top: int = own(20, "best tokens of the old policy that the top-k divergences tell apart", minimum=1)
    clip_ratio_c: float | None = own(
        5.0, "upper bound of the ratio as a weight; None = none (the paper's stability runs)", minimum=1
    )

    @property
    def needs(self) -> frozenset[Needs]:
        """The columns that the chosen divergence reads."""
        top = frozenset({Needs.OLD_LOGPROBS, Needs.LOG_PROBS, Needs.OLD_TOP})
        return frozenset() if self.corrects_rollout else top

    @property
    def corrects_rollout(self) -> bool:
        """True for the binary divergences, whose ratio does."""
        return self.divergence_type in ("binary_tv", "binary_kl")

    @property
    def uses_old_logprobs(self) -> bool:
        """True for the top-k divergences."""
        return not self.corrects_rollout

    @property
    def inert_options(self) -> Mapping[str, str]:
        """num_top, for the binary divergences."""
        if not self.corrects_rollout:
            return {}
        reason = f"divergence_type={self.divergence_type} looks only at the sampled token; use topk_tv or topk_kl"
        return {"loss_options.num_top": reason}

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Compute the masked surrogate; the metric is D."""
        scope, kind = self.divergence_type.split("_")
        if scope == "binary":
            old_logprobs = inputs.needed("rollout_logprobs")
            divergence = binary_divergence(inputs.logprobs, old_logprobs, kind)
        else:
            old_logprobs = inputs.old_logprobs
            log_probs, token_ids = inputs.needed("log_probs"), inputs.needed("token_ids")
            old_top = inputs.needed("old_top_ids"), inputs.needed("old_top_logprobs")
            divergence = top_divergence(log_probs, token_ids, old_logprobs, *old_top, kind)
        log_ratio = masked_log_ratio(inputs.logprobs, old_logprobs, inputs.mask)
        return self.surrogate(log_ratio, inputs.advantages.detach(), divergence)

    def surrogate(self, log_ratio: Tensor, advantages: Tensor, divergence: Tensor) -> PolicyLoss:
        """Compute the loss of these ratios, advantages and D(old, policy), float [T] each. log_ratio: with gradient."""
        check_columns(log_ratio=log_ratio, advantages=advantages, divergence=divergence)
        threshold = THRESHOLDS[self.divergence_type.split("_")[1]]
        outside = divergence > (threshold if self.divergence_threshold is None else self.divergence_threshold)
        log_ratio = bounded(log_ratio)
        ratio = log_ratio.exp()
        detached = ratio.detach()
        high = (advantages > 0) & (detached > 1) & outside
        low = (advantages < 0) & (detached < 1) & outside
        weight = detached if self.clip_ratio_c is None else detached.clamp(max=self.clip_ratio_c)
        surrogate = weight * (log_ratio - log_ratio.detach()).exp()
        per_token = torch.where(high | low, torch.zeros_like(surrogate), -surrogate * advantages)
        return PolicyLoss(per_token, ratio, detached, low, high, metrics={"divergence/mean": divergence})


def binary_divergence(logprobs: Tensor, old_logprobs: Tensor, kind: str) -> Tensor:
    """Compute D(old || policy) of the two events "this token" and "another one", float64 [T], detached: a lower bound
    of the divergence over the vocabulary. arXiv:2602.04879, eq. 13 (kind="tv") and eq. 14 (kind="kl").

    logprobs, old_logprobs: float [T], ln p of the sampled token. A probability of 1 - p below 1e-12 counts as 1e-12.
    """
    check_columns(logprobs=logprobs, old_logprobs=old_logprobs)
    policy, old = (values.detach().double()[:, None] for values in (logprobs, old_logprobs))
    # expm1: 1 - p of a token that is nearly certain keeps its digits.
    return _divergence(policy, -policy.expm1(), old, -old.expm1(), kind)


def top_divergence(
    log_probs: Tensor, token_ids: Tensor, old_logprobs: Tensor, old_top_ids: Tensor, old_top_logprobs: Tensor, kind: str
) -> Tensor:
    """Compute D(old || policy) over the best tokens of the old policy, the sampled token and "other", float64 [T],
    detached: a lower bound of the divergence over the vocabulary. arXiv:2602.04879, eq. 15 (kind="tv") and eq. 16
    (kind="kl").

    log_probs: float [T, V], of the policy; token_ids: int64 [T] and old_logprobs: float [T], of the sampled tokens;
    old_top_ids: int64 [T, K], K different ids a token; old_top_logprobs: float [T, K]. A probability of "other" below
    1e-12 counts as 1e-12.
    """
    num_tokens = log_probs.shape[0]
    if log_probs.dim() != 2 or token_ids.shape != (num_tokens,) or old_logprobs.shape != (num_tokens,):
        raise ValueError(
            f"log_probs must be [T, V], token_ids and old_logprobs [T], not {tuple(log_probs.shape)}, "
            f"{tuple(token_ids.shape)} and {tuple(old_logprobs.shape)}"
        )
    if old_top_ids.dim() != 2 or len(old_top_ids) != num_tokens or old_top_logprobs.shape != old_top_ids.shape:
        raise ValueError(
            f"old_top_ids and old_top_logprobs must be [{num_tokens}, K], not {tuple(old_top_ids.shape)} and "
            f"{tuple(old_top_logprobs.shape)}"
        )
    ids = torch.cat([old_top_ids, token_ids[:, None]], dim=1)
    policy = log_probs.detach().gather(1, ids).double()
    old = torch.cat([old_top_logprobs.detach().double(), old_logprobs.detach().double()[:, None]], dim=1)
    # A sampled token that is among the best is counted there.
    known = (old_top_ids == token_ids[:, None]).any(1)
    for events in (policy, old):
        events[:, -1].masked_fill_(known, -torch.inf)
    return _divergence(policy, 1 - policy.exp().sum(1, keepdim=True), old, 1 - old.exp().sum(1, keepdim=True), kind)


def _divergence(policy: Tensor, policy_rest: Tensor, old: Tensor, old_rest: Tensor, kind: str) -> Tensor:
    """Compute D(old || policy). policy, old: ln p of N events, [T, N], -inf in both for no event; policy_rest,
    old_rest: p of all others, [T, 1]. Returns [T]."""
    rests = torch.cat([old_rest, policy_rest], dim=1).clamp(min=REST_FLOOR)
    if kind == "tv":
        return 0.5 * ((old.exp() - policy.exp()).abs().sum(1) + (rests[:, 0] - rests[:, 1]).abs())
    if kind == "kl":
        terms = torch.where(old == -torch.inf, torch.zeros_like(old), old.exp() * (old - policy))
        return terms.sum(1) + rests[:, 0] * (rests[:, 0] / rests[:, 1]).log()
    raise ValueError(f"kind={kind!r} is unknown; use tv or kl")
