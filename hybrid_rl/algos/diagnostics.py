"""How far the engine that sampled is from the trainer, and how old its samples are: numbers for the log.

All functions take the columns of all ranks, whole: quantiles and effective sample sizes of parts do not add up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_rl.algos.columns import check_columns, ratio_of
from hybrid_rl.algos.correction import Corrected
from hybrid_rl.algos.kl import kl_estimate
from hybrid_rl.algos.masked import row_sum

AGES = ("0", "1", "2", "3_or_more")  # of tokens, in policy versions, in names of metrics


def gap_diagnostics(
    trainer: Tensor, engine: Tensor, mask: Tensor, rows: Tensor, ages: Tensor, num_rows: int
) -> dict[str, float]:
    """Compute all numbers about the gap, as in `mismatch`, `staleness` and `ratios_by_age`; empty if no token is in the
    mask.

    trainer, engine: float [T], logprobs of the sampled tokens, before any update; mask: bool [T]; rows: int64 [T], in
    0..num_rows-1; ages: int64 [T], policy versions between token and learner, 0 if unknown.
    """
    check_columns(trainer=trainer, engine=engine, mask=mask, rows=rows, ages=ages)
    gap = mismatch(trainer, engine, mask, rows, num_rows)
    return {**gap, **staleness(ages, mask), **ratios_by_age(trainer, engine, mask, ages)}


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> dict[str, float]:
    """Compare trainer and engine; empty if no token is in the mask. With w = trainer / engine for tokens that the
    engine sampled:

    - mismatch/ess_tokens, mismatch/ess_samples: effective sample size of w over tokens, and of its product over samples
      (those with tokens), as a share: (sum w)^2 / (n sum w^2); 1 if all are equal
    - mismatch/ratio_{p01,p50,p99}: quantiles of w over tokens
    - mismatch/kl_{k1,k3}: KL(engine || trainer) per token; mismatch/reverse_kl_{k1,k3}: KL(trainer || engine), from the
      same tokens with weight w. k3 is never negative; k1 is its noisier twin
    - mismatch/perplexity_{trainer,engine}: exp(-mean logprob) over tokens
    """
    check_columns(trainer=trainer, engine=engine, mask=mask, rows=rows)
    if not bool(mask.any()):
        return {}
    mine, theirs, rows = trainer[mask].double(), engine[mask].double(), rows[mask]
    log_ratio = mine - theirs
    ratio = ratio_of(log_ratio)
    has_tokens = torch.zeros(num_rows, dtype=torch.bool, device=rows.device).index_fill(0, rows, True)
    ordered = ratio.sort().values
    metrics = {
        "mismatch/ess_tokens": effective_sample_share(log_ratio),
        "mismatch/ess_samples": effective_sample_share(row_sum(log_ratio, rows, num_rows)[has_tokens]),
        "mismatch/perplexity_trainer": float((-mine.mean()).exp()),
        "mismatch/perplexity_engine": float((-theirs.mean()).exp()),
    }
    for percent in (1, 50, 99):
        metrics[f"mismatch/ratio_p{percent:02d}"] = _quantile(ordered, percent / 100)
    for estimator in ("k1", "k3"):
        metrics[f"mismatch/kl_{estimator}"] = float(kl_estimate(theirs, mine, estimator).mean())
        metrics[f"mismatch/reverse_kl_{estimator}"] = float((ratio * kl_estimate(mine, theirs, estimator)).mean())
    return metrics


def staleness(ages: Tensor, mask: Tensor) -> dict[str, float]:
    """Compute staleness/mean_age in policy versions, and staleness/share_age_{0,1,2,3_or_more}, shares of tokens. ages:
    int64 [T]; mask: bool [T]. Empty if no token is in the mask."""
    check_columns(ages=ages, mask=mask)
    if not bool(mask.any()):
        return {}
    ages = ages[mask].clamp(min=0)
    counts = torch.bincount(ages.clamp(max=len(AGES) - 1), minlength=len(AGES)).tolist()
    shares = {f"staleness/share_age_{name}": count / len(ages) for name, count in zip(AGES, counts, strict=True)}
    return {"staleness/mean_age": float(ages.double().mean()), **shares}


def ratios_by_age(trainer: Tensor, engine: Tensor, mask: Tensor, ages: Tensor) -> dict[str, float]:
    """Compute staleness/ratio_{p05,p50,p95}_age_{0,1,2,3_or_more}, quantiles of trainer / engine over the tokens of an
    age, of each that there is. Arguments as in `gap_diagnostics`. Empty if no token in the mask is older than 0: then
    `mismatch` says the same."""
    check_columns(trainer=trainer, engine=engine, mask=mask, ages=ages)
    ages = ages[mask].clamp(min=0, max=len(AGES) - 1)
    if not bool((ages > 0).any()):
        return {}
    ratio = ratio_of(trainer[mask].double() - engine[mask].double())
    quantiles: dict[str, float] = {}
    for age, name in enumerate(AGES):
        ordered = ratio[ages == age].sort().values
        if len(ordered):
            quantiles |= {
                f"staleness/ratio_p{percent:02d}_age_{name}": _quantile(ordered, percent / 100)
                for percent in (5, 50, 95)
            }
    return quantiles


def correction_diagnostics(found: Corrected, mask: Tensor, rows: Tensor, num_rows: int) -> dict[str, float]:
    """Count what a correction does to these tokens. Empty if no token is in the mask.

    mismatch/truncated_tokens, mismatch/rejected_tokens: shares of tokens; mismatch/rejected_samples: share of samples
    (those with tokens) of which nothing is left; mismatch/ess_corrected: effective sample size of the weights over
    tokens, as a share, 0 if all are 0.
    """
    check_columns(weights=found.weights, mask=mask, rows=rows)
    if not bool(mask.any()):
        return {}
    tokens = row_sum(mask.double(), rows, num_rows)
    rejected = row_sum((found.rejected & mask).double(), rows, num_rows)
    num_tokens = float(tokens.sum())
    return {
        "mismatch/truncated_tokens": float((found.truncated & mask).sum()) / num_tokens,
        "mismatch/rejected_tokens": float(rejected.sum()) / num_tokens,
        "mismatch/rejected_samples": float((rejected == tokens)[tokens > 0].double().mean()),
        "mismatch/ess_corrected": effective_sample_share(found.weights[mask].double().log()),
    }


def effective_sample_share(log_weights: Tensor) -> float:
    """Compute (sum w)^2 / (n sum w^2), between 1/n and 1; 0 if all weights are 0. log_weights: float [n], ln w: a
    product over a long completion may not fit in w itself."""
    if log_weights.dim() != 1 or not len(log_weights):
        raise ValueError(f"log_weights must be [n] with n > 0, not {tuple(log_weights.shape)}")
    if bool(log_weights.isneginf().all()):
        return 0.0
    log_share = 2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0) - math.log(len(log_weights))
    return float(log_share.exp())


def _quantile(ordered: Tensor, share: float) -> float:
    """Interpolate linearly between neighbours, as torch.quantile, which refuses more than 2^24 values."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low].lerp(ordered[high], place - low))
