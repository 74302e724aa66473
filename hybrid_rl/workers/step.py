"""The arithmetic of a training step on one rank: a micro-batch's share of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algos import (
    CorrectionInputs,
    KLInLoss,
    LossInputs,
    PolicyLoss,
    kl_estimate,
    row_mean,
    token_weights,
)
from hybrid_rl.algos.kl import exact_kl
from hybrid_rl.batch import Batch
from hybrid_rl.config import AlgorithmConfig, TrainerConfig
from hybrid_rl.metrics import MetricSums
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.distribution import chosen_and_entropy
from hybrid_rl.models.router import Routers
from hybrid_rl.workers.routing import reading_old_experts


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
    """Denominators of a mini-batch over all ranks: tokens in the loss, samples that were scored, and tokens in the loss
    of samples with a positive reward."""

    num_tokens: int = 0
    num_samples: int = 0
    num_positive_tokens: int = 0

    @classmethod
    def of(cls, batch: Batch, config: AlgorithmConfig) -> Counts:
        """Count a rank's share of a mini-batch."""
        mask = loss_mask(batch, mask_truncated_completions=config.mask_truncated_completions)
        positive = mask & (batch["rewards"] > 0)[batch["completion_ids"].row_index()]
        return cls(int(mask.sum()), int((~batch["rewards"].isnan()).sum()), int(positive.sum()))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.num_tokens + other.num_tokens,
            self.num_samples + other.num_samples,
            self.num_positive_tokens + other.num_positive_tokens,
        )


@dataclass(frozen=True)
class Terms:
    """What a loss is made of beside the batch. beta: present weight of a KL penalty in the loss; version: of the policy
    at the start of the training step; parameters: learned beside the model, float64 [P]; reference: the model, where
    the KL is taken over the whole vocabulary; routers: of the policy, where the loss needs their scores."""

    config: TrainerConfig
    beta: float = 0.0
    version: int = 0
    parameters: Tensor | None = None
    reference: CausalLM | None = None
    routers: Routers | None = None

    @property
    def is_exact_kl(self) -> bool:
        """Whether the KL in the loss is that of whole distributions."""
        return isinstance(self.config.kl, KLInLoss) and self.config.kl.kl_estimator == "exact"


def micro_batch_loss(model: CausalLM, batch: Batch, terms: Terms, counts: Counts) -> tuple[Tensor, MetricSums, Tensor]:
    """This micro-batch's part of the mini-batch's loss: a scalar to call backward on; the parts add up to the loss.

    Returns the loss, sums for the metrics, and the detached logprobs [M]. Without a column old_logprobs the learner's
    own are used, detached: the ratio is 1 and carries the gradient.
    """
    config, algorithm, device = terms.config, terms.config.algorithm, model.device
    row = PackedRow.of(batch["prompt_ids"], batch["completion_ids"], device)
    log_probs: Tensor | None = None
    with reading_old_experts(terms.routers, batch, row) as reading:
        if terms.is_exact_kl or "log_probs" in config.policy_loss.needs:
            log_probs = model.row_distribution(row, config.rollout.temperature)
            logprobs, entropy = chosen_and_entropy(log_probs, row.labels)
        else:
            logprobs, entropy = model.row_logprobs(row, config.rollout.temperature)
    mask = loss_mask(batch, mask_truncated_completions=algorithm.mask_truncated_completions).to(device)
    router_logprobs = None if reading is None else reading.logprobs
    inputs = loss_inputs(batch, logprobs, entropy, mask, terms, log_probs, router_logprobs)
    loss = config.policy_loss.loss(inputs)
    if not isinstance(loss, PolicyLoss):
        name = type(config.policy_loss).__name__
        raise TypeError(f"{name}.loss gave a {type(loss).__name__}; it must return a hybrid_rl.algos.PolicyLoss")
    per_token, sums = loss.per_token, MetricSums()
    if config.correction.is_active:
        corrected = config.correction.weigh(correction_inputs(inputs))
        per_token = per_token * corrected.weights
        sums.mean("mismatch/mean_weight", float(corrected.weights[mask].sum()), _count(mask))
    if isinstance(config.kl, KLInLoss):
        kl = _kl_per_token(config.kl, batch, inputs, loss, row, terms)
        per_token = per_token + terms.beta * kl
        sums.mean("kl", float(kl.detach()[mask].sum()), _count(mask))
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * entropy
    weights = token_weights(
        mask,
        inputs.rows,
        inputs.num_rows,
        algorithm.loss_type,
        num_tokens=counts.num_tokens,
        num_samples=counts.num_samples,
        max_completion_length=config.rollout.max_completion_length,
    )
    # torch.where: where the mask is off a value that is not finite must not reach loss or gradient.
    total = (weights * torch.where(mask, per_token, torch.zeros_like(per_token))).sum()
    if algorithm.positive_nll_coef:
        positive = mask & (batch["rewards"] > 0).to(device)[inputs.rows]
        nll = -torch.where(positive, logprobs, torch.zeros_like(logprobs)).sum() / max(counts.num_positive_tokens, 1)
        total = total + algorithm.positive_nll_coef * nll
    _add_metrics(sums, loss, inputs, entropy.detach())
    return total, sums, inputs.logprobs.detach()


def loss_inputs(
    batch: Batch,
    logprobs: Tensor,
    entropy: Tensor,
    mask: Tensor,
    terms: Terms,
    log_probs: Tensor | None = None,
    router_logprobs: Tensor | None = None,
) -> LossInputs:
    """The columns of a micro-batch as a policy loss takes them, on the device of the logprobs."""
    device, completions = logprobs.device, batch["completion_ids"]

    def values(name: str) -> Tensor | None:
        return batch[name].values.to(device) if name in batch else None

    own = logprobs.detach()
    old, rollout = values("old_logprobs"), values("rollout_logprobs")
    old_router = None if router_logprobs is None else batch["old_router_logprobs"].values.to(device)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=own if old is None else old,
        advantages=batch["advantages"].values.to(device),
        mask=mask,
        rows=completions.row_index().to(device),
        num_rows=batch.num_samples,
        entropy=entropy,
        rollout_logprobs=own if rollout is None else rollout,
        token_versions=values("policy_version"),
        version=terms.version,
        prepared=values("prepared"),
        log_probs=log_probs,
        token_ids=completions.values.to(device),
        old_top_ids=values("old_top_ids"),
        old_top_logprobs=values("old_top_logprobs"),
        router_logprobs=router_logprobs,
        old_router_logprobs=None if old_router is None else old_router.view_as(router_logprobs),
        parameters=terms.parameters,
    )


def correction_inputs(inputs: LossInputs) -> CorrectionInputs:
    """The same tokens as a correction takes them."""
    versions = inputs.token_versions
    ages = torch.zeros_like(inputs.rows) if versions is None else (inputs.version - versions).clamp(min=0)
    if versions is not None:
        ages = torch.where(versions < 0, torch.zeros_like(ages), ages)  # made by no policy
    return CorrectionInputs(
        inputs.old_logprobs, inputs.rollout_logprobs, inputs.mask, inputs.rows, inputs.num_rows, ages
    )


def _kl_per_token(
    kl: KLInLoss, batch: Batch, inputs: LossInputs, loss: PolicyLoss, row: PackedRow, terms: Terms
) -> Tensor:
    """The KL penalty at each token, [T] with gradient, before its weight beta."""
    if terms.is_exact_kl:
        assert inputs.log_probs is not None and terms.reference is not None
        with torch.no_grad():
            reference = terms.reference.row_distribution(row, terms.config.rollout.temperature)
        return exact_kl(inputs.log_probs, reference)
    ref_logprobs = batch["ref_logprobs"].values.to(inputs.logprobs.device)
    # torch.where: where the mask is off an overflow of exp would reach the gradient as 0 * inf.
    ref_logprobs = torch.where(inputs.mask, ref_logprobs, inputs.logprobs.detach())
    estimate = kl_estimate(inputs.logprobs, ref_logprobs, kl.kl_estimator)
    return estimate * loss.weight if kl.use_bias_correction_kl else estimate


def _count(mask: Tensor) -> int:
    return int(mask.sum())


def _add_metrics(sums: MetricSums, loss: PolicyLoss, inputs: LossInputs, entropy: Tensor) -> None:
    mask, rows, num_rows = inputs.mask, inputs.rows, inputs.num_rows
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
    sums.mean("advantages/zero_share", float((inputs.advantages[mask] == 0).sum()), count)
    for name, values in loss.metrics.items():
        sums.mean(name, float(values.detach()[mask].sum()), count)
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
