"""The mismatch of engine and trainer: metrics of it, and a guard that stops before anything is learned from one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_rl.algos import Correction, CorrectionInputs, kl_estimate
from hybrid_rl.algos.diagnostics import correction_diagnostics, gap_diagnostics
from hybrid_rl.batch import Batch
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import HandoffError
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.training.spec import loss_mask

# First steps of a process, whose gaps say what is usual, and how many times the largest of them a gap may be. Not the
# latest ones: an engine that stays behind differs a little more in every step.
NUM_FIRST, MOST_TIMES = 16, 10.0
# Gaps that are never taken for a fault: some hundred times what float32 of other kernels makes, and a few times what
# roundings to 16 bits do to a small model. Before anything is known only weights that have nothing in common are one.
LEAST_GAP = {torch.float64: 1e-3, torch.float32: 1e-3}
LEAST_GAP_16_BIT, FIRST_GAP = 0.1, 0.5
MOST_OF_A_TOKEN = 1.0  # a gap of ln p counts no more: a few unlikely tokens say little


class MismatchGuard:
    """Compares what engine and trainer say of the tokens of a step before its first update, and raises HandoffError if
    they differ far more than in the first ones.

    Both must give the tokens that the present weights sampled the same logprobs, but for rounding. This shows what a
    comparison of the weights' bytes cannot: a cache of the old policy, buffers, and what an engine has derived from its
    weights. dtype: that the trainer computes in.
    """

    def __init__(self, dtype: torch.dtype, context: RankContext) -> None:
        self._least, self._context = LEAST_GAP.get(dtype, LEAST_GAP_16_BIT), context
        self._gaps: list[float] = []

    @property
    def tolerance(self) -> float:
        """The mean gap of ln p that the next step may have."""
        return max(self._least, MOST_TIMES * max(self._gaps)) if self._gaps else max(self._least, FIRST_GAP)

    def check(self, batch: Batch, logprobs: Tensor, version: int) -> None:
        """Compare the tokens of a batch that this policy version sampled. logprobs: float32 [M], the trainer's.
        Collective; raises on every rank, naming the ranks that differ most."""
        on = loss_mask(batch, mask_truncated_completions=False) & (batch["policy_version"].values == version)
        self.check_gaps(logprobs[on].double() - batch["rollout_logprobs"].values[on].double(), version)

    def check_gaps(self, gaps: Tensor, version: int) -> None:
        """Do it for the differences of ln p of this rank's tokens, float64 [N]. Collective."""
        gaps = gaps.abs().clamp(max=MOST_OF_A_TOKEN)
        parts = self._context.data_gather((float(gaps.sum()), len(gaps)))
        count = sum(number for _, number in parts)
        if not count or any(math.isnan(total) for total, _ in parts):
            return  # of what is not finite the update itself says more
        gap, tolerance = sum(total for total, _ in parts) / count, self.tolerance
        if gap > tolerance:
            means = [total / number if number else 0.0 for total, number in parts]
            worst = max(range(len(means)), key=means.__getitem__)
            usual = f"at most {max(self._gaps):.2g} in the first steps" if self._gaps else "nothing known before"
            raise HandoffError(
                f"update with policy version {version}: engine and trainer differ by {gap:.3g} on average in ln p of "
                f"the {count} tokens that it sampled ({usual}; {tolerance:.2g} is allowed), most on rank {worst} "
                f"({means[worst]:.3g}). The policy has not learned from them. The engine generated with a cache, "
                "buffers or derived tensors of other weights, with the module's before it was changed by hand, or it "
                "computes differently now. handoff.probe_steps=1 looks at every handoff, 0 compares nothing"
            )
        if len(self._gaps) < NUM_FIRST:
            self._gaps.append(gap)


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
