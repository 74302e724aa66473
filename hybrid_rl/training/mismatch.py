"""Metrics of the engine/trainer mismatch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rl.algos import Correction, CorrectionInputs, kl_estimate
from hybrid_rl.algos.diagnostics import correction_diagnostics, gap_diagnostics
from hybrid_rl.batch import Batch
from hybrid_rl.controller import RankContext
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.training.spec import loss_mask


def rollout_gap(
    batch: Batch, logprobs: Tensor, correction: Correction, context: RankContext, version: int
) -> MetricSums:
    """Measure how far the trainer, before any update, is from the engine that sampled. logprobs: float32 [M], of all
    completion tokens of the batch. Collective."""
    mask = loss_mask(batch, mask_truncated_completions=False)
    rollout = batch["rollout_logprobs"].values
    sums = mismatch_metrics(logprobs, rollout, mask)
    versions = batch["policy_version"].values
    ages = torch.where(versions < 0, torch.zeros_like(versions), version - versions)
    columns = (logprobs, rollout, mask, ages, batch["completion_ids"].lengths)
    everywhere = context.data_gather(columns)
    if context.data_rank == 0:
        trainer, engine, on, age, lengths = (torch.cat(parts) for parts in zip(*everywhere, strict=True))
        rows = torch.arange(len(lengths)).repeat_interleave(lengths)
        diagnostics = gap_diagnostics(trainer, engine, on, rows, age, len(lengths))
        if correction.is_active:
            corrected = correction.weigh(CorrectionInputs(trainer, engine, on, rows, len(lengths), age))
            diagnostics |= correction_diagnostics(corrected, on, rows, len(lengths))
        for name, value in diagnostics.items():
            sums.mean(name, value, 1)
    return sums


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> MetricSums:
    """Measure how far the engine's logprobs are from the trainer's, on the sampled tokens. All [M], before any update.

    sampling/sampling_logp_difference: |difference of ln p| (TRL); mismatch/prob_difference_mean: |difference of p|
    (verl: below 0.005 is good, above 0.01 a precision problem); mismatch/kl: k3 estimate of KL(rollout || trainer).
    """
    sums = MetricSums()
    count = int(mask.sum())
    if count:
        mine, theirs = logprobs[mask].double(), rollout_logprobs[mask].double()
        gap = (mine - theirs).abs()
        sums.mean("sampling/sampling_logp_difference/mean", float(gap.sum()), count)
        sums.high("sampling/sampling_logp_difference/max", float(gap.max()))
        sums.mean("mismatch/prob_difference_mean", float((mine.exp() - theirs.exp()).abs().sum()), count)
        sums.mean("mismatch/kl", float(kl_estimate(theirs, mine, "k3").sum()), count)
    return sums
