"""The arithmetic of a training step on one rank: packing a micro-batch, its logprobs, its share of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algos import Algorithm, PolicyLoss, kl_estimate, row_mean, token_weights
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import AlgorithmConfig
from hybrid_rl.controller import mark_progress
from hybrid_rl.metrics import MetricSums
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.workers.plan import micro_batch


def micro_batch_logprobs(model: CausalLM, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """ln p and entropy of the completion tokens of a micro-batch, float32 [M] each, in the order of completion_ids."""
    row = PackedRow.of(batch["prompt_ids"], batch["completion_ids"], model.device)
    return model.row_logprobs(row, temperature)


@torch.no_grad()
def batch_logprobs(model: CausalLM, batch: Batch, micro_batches: Sequence[Sequence[int]], temperature: float) -> Jagged:
    """ln p of all completion tokens of a batch, computed micro-batch by micro-batch, aligned with completion_ids."""
    completions = batch["completion_ids"]
    values = torch.zeros(completions.values.shape[0], dtype=torch.float32)
    place = completions.with_values(torch.arange(completions.values.shape[0]))
    for rows in micro_batches:
        mark_progress()
        logprobs, _ = micro_batch_logprobs(model, micro_batch(batch, rows), temperature)
        if rows:
            values[place.select(torch.as_tensor(rows)).values] = logprobs.float().cpu()
    return completions.with_values(values)


def loss_mask(batch: Batch, *, mask_truncated_completions: bool) -> Tensor:
    """Completion tokens that take part in the loss, bool [M]: made by the policy, of a sample that was scored and, on
    request, not cut off by the length limit."""
    mask, rows = batch["completion_mask"].values, batch["completion_ids"].row_index()
    keep = ~batch["rewards"].isnan()
    if mask_truncated_completions:
        keep &= torch.tensor([reason != "length" for reason in batch["finish_reason"]])
    return mask & keep[rows]


@dataclass(frozen=True)
class Counts:
    """Denominators of a mini-batch over all ranks: tokens in the loss, and samples that were scored."""

    num_tokens: int
    num_samples: int

    @classmethod
    def of(cls, batch: Batch, config: AlgorithmConfig) -> Counts:
        """Count a rank's share of a mini-batch."""
        mask = loss_mask(batch, mask_truncated_completions=config.mask_truncated_completions)
        return cls(int(mask.sum()), int((~batch["rewards"].isnan()).sum()))

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.num_tokens + other.num_tokens, self.num_samples + other.num_samples)


def micro_batch_loss(
    model: CausalLM,
    batch: Batch,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    counts: Counts,
    *,
    temperature: float,
    max_completion_length: int,
) -> tuple[Tensor, MetricSums, Tensor]:
    """This micro-batch's part of the mini-batch's loss: a scalar to call backward on; the parts add up to the loss.

    Returns the loss, sums for the metrics, and the detached logprobs [M]. Without a column old_logprobs the learner's
    own are used, detached: the ratio is 1 and carries the gradient.
    """
    device = model.device
    logprobs, entropy = micro_batch_logprobs(model, batch, temperature)
    rows = batch["completion_ids"].row_index().to(device)
    mask = loss_mask(batch, mask_truncated_completions=config.mask_truncated_completions).to(device)
    own = logprobs.detach()
    old = batch["old_logprobs"].values.to(device) if "old_logprobs" in batch else own
    advantages = batch["advantages"].values.to(device)
    num_rows = batch.num_samples
    loss = algorithm.policy_loss(
        logprobs, old, advantages, mask, rows, num_rows, **options_of(config, algorithm.loss_options)
    )
    per_token = loss.per_token
    sums = MetricSums()
    if config.beta > 0:
        # torch.where: where the mask is off an overflow of exp would reach the gradient as 0 * inf.
        reference = torch.where(mask, batch["ref_logprobs"].values.to(device), own)
        kl = kl_estimate(logprobs, reference, config.kl_estimator)
        if config.use_bias_correction_kl:
            kl = kl * loss.weight
        per_token = per_token + config.beta * kl
        sums.mean("kl", float(kl.detach()[mask].sum()), _count(mask))
    weights = token_weights(
        mask,
        rows,
        num_rows,
        config.loss_type,
        num_tokens=counts.num_tokens,
        num_samples=counts.num_samples,
        max_completion_length=max_completion_length,
    )
    total = (weights * per_token).sum()
    _add_metrics(sums, loss, entropy.detach(), mask, rows, num_rows)
    return total, sums, own


def options_of(config: AlgorithmConfig, names: Sequence[str]) -> Mapping[str, Any]:
    """The config leaves that an algorithm's function takes by keyword."""
    return {name: getattr(config, name) for name in names}


def _count(mask: Tensor) -> int:
    return int(mask.sum())


def _add_metrics(
    sums: MetricSums, loss: PolicyLoss, entropy: Tensor, mask: Tensor, rows: Tensor, num_rows: int
) -> None:
    count = _count(mask)
    if not count:
        return
    sums.mean("entropy", float(entropy[mask].sum()), count)
    present = torch.zeros(num_rows, dtype=torch.bool, device=mask.device).index_fill(0, rows[mask], True)
    clipped = {"low": loss.clipped_low, "high": loss.clipped_high, "region": loss.clipped_low | loss.clipped_high}
    shares = {side: row_mean(which.float(), mask, rows, num_rows)[present] for side, which in clipped.items()}
    for side, which in clipped.items():
        name = f"clip_ratio/{side}_mean"
        if loss.per_sample:
            sums.mean(name, float(shares[side].sum()), len(shares[side]))
        else:
            sums.mean(name, float(which[mask].sum()), count)
    sums.low("clip_ratio/low_min", float(shares["low"].min()))
    sums.high("clip_ratio/high_max", float(shares["high"].max()))
    sums.mean("ratio/mean", float(loss.ratio[mask].sum()), count)
    sums.low("ratio/min", float(loss.ratio[mask].min()))
    sums.high("ratio/max", float(loss.ratio[mask].max()))


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> MetricSums:
    """How far the engine's logprobs are from the trainer's, on the sampled tokens. All [M]; both before any update.

    sampling/sampling_logp_difference: |difference of ln p| (TRL); mismatch/prob_difference_mean: |difference of p|
    (verl: below 0.005 is good, above 0.01 a precision problem); mismatch/kl: k3 estimate of KL(rollout || trainer).
    """
    sums = MetricSums()
    count = _count(mask)
    if count:
        mine, theirs = logprobs[mask].double(), rollout_logprobs[mask].double()
        gap = (mine - theirs).abs()
        sums.mean("sampling/sampling_logp_difference/mean", float(gap.sum()), count)
        sums.high("sampling/sampling_logp_difference/max", float(gap.max()))
        sums.mean("mismatch/prob_difference_mean", float((mine.exp() - theirs.exp()).abs().sum()), count)
        sums.mean("mismatch/kl", float(kl_estimate(theirs, mine, "k3").sum()), count)
    return sums
