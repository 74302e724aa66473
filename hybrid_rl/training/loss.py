"""A micro-batch's part of the policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rl.algos import KLInLoss, LossInputs, PolicyLoss, kl_estimate, row_mean, row_sum, token_weights
from hybrid_rl.algos.kl import exact_kl
from hybrid_rl.algos.masked import entropy_quantile, off_policy_mask
from hybrid_rl.batch import Batch
from hybrid_rl.batch.temperature import sampling_temperature
from hybrid_rl.errors import DataError
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.heads.distribution import chosen_and_entropy
from hybrid_rl.training.loss_inputs import Masks, correction_inputs, loss_inputs
from hybrid_rl.training.router_scores import reading_balance, reading_old_experts
from hybrid_rl.training.routing_replay import followed, row_of
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels


def micro_batch_loss(
    model: CausalLM, batch: Batch, spec: LossSpec, mini: MiniBatch, beside: SideModels | None = None
) -> tuple[Tensor, MetricSums, Tensor]:
    """Compute a micro-batch's part of its mini-batch's loss: a scalar to call backward on; the parts add up.

    batch: the columns prompt_ids, completion_ids, completion_mask, rewards, temperature and advantages, finish_reason
    if truncated completions are masked, and what the terms of the loss need: old_logprobs, rollout_logprobs,
    ref_logprobs, and trajectory_tokens if trajectories have several turns. Without old_logprobs the learner's own are
    used, detached: the ratio is 1 and carries the gradient.

    Returns the loss, sums for the metrics, and what the model said of the M tokens, detached [2, M]: their logprobs,
    and the entropy where each was chosen. Raises DataError for samples of several temperatures, or without a column
    that a term needs.
    """
    beside = SideModels() if beside is None else beside
    row = row_of(model, batch)
    temperature = sampling_temperature(batch)
    with (
        reading_old_experts(beside.routers, batch, row) as reading,
        reading_balance(beside.balance, batch, row, spec) as balance,
    ):
        logprobs, entropy, log_probs = model_outputs(model, row, spec, temperature)
    masks = Masks.of(batch, spec)
    inputs, extra = loss_inputs(
        batch, row, (logprobs, entropy), masks, mini, log_probs, None if reading is None else reading.logprobs
    )
    mask = inputs.mask
    loss = spec.policy_loss.loss(inputs)
    if not isinstance(loss, PolicyLoss):
        name = type(spec.policy_loss).__name__
        raise TypeError(f"{name}.loss gave a {type(loss).__name__}; it must return a hybrid_rl.algos.PolicyLoss")
    per_token, sums, factor = loss.per_token, MetricSums(), torch.ones_like(loss.ratio)
    if spec.algorithm.off_policy_mask_threshold is not None:
        near = off_policy_mask(
            *(inputs.logprobs, inputs.needed("rollout_logprobs"), inputs.advantages),
            *(mask, inputs.rows, inputs.num_rows),
            threshold=spec.algorithm.off_policy_mask_threshold,
        )
        per_token, factor = _masked(per_token, near), _masked(factor, near)
        sums.mean("mismatch/off_policy_masked", (mask & ~near).sum(), masks.num_tokens)
    if spec.has_entropy_threshold:
        least = mini.least_entropy
        if least is None:
            least = entropy_quantile(entropy, mask, spec.algorithm.top_entropy_quantile, num_tokens=masks.num_tokens)
        is_high = entropy.detach().double() >= least
        per_token, entropy, factor = (_masked(values, is_high) for values in (per_token, entropy, factor))
        sums.mean("top_entropy/tokens", (mask & is_high).sum(), masks.num_tokens)
        sums.mean("top_entropy/part_of_entropy", _masked(entropy.detach(), mask).sum(), masks.num_tokens)
    if spec.correction.is_active:
        corrected = spec.correction.weigh(correction_inputs(inputs))
        per_token, factor = per_token * corrected.weights, factor * corrected.weights
        sums.mean("mismatch/mean_weight", _masked(corrected.weights, mask).sum(), masks.num_tokens)
    if isinstance(spec.kl, KLInLoss):
        kl = _kl_per_token(spec.kl, extra.ref_logprobs, inputs, loss, row, beside.reference, temperature)
        per_token = per_token + mini.beta * kl
        sums.mean("kl", _masked(kl.detach(), mask).sum(), masks.num_tokens)
    if mini.entropy_coef:
        per_token = per_token - mini.entropy_coef * entropy
    weights = token_weights(
        mask,
        inputs.rows,
        inputs.num_rows,
        spec.algorithm.loss_type,
        num_tokens=mini.counts.num_tokens,
        num_trajectories=mini.counts.num_trajectories,
        max_completion_length=spec.max_completion_length,
        lengths=extra.trajectory_tokens,
    )
    if beside.record is not None:
        beside.record.note(logprobs, loss, weights * _masked(factor, mask))
    total = (weights * _masked(per_token, mask)).sum()
    if spec.algorithm.positive_nll_coef:
        nll = -_masked(logprobs, extra.positive).sum() / max(mini.counts.num_positive_tokens, 1)
        total = total + spec.algorithm.positive_nll_coef * nll
    if beside.balance is not None and balance is not None:
        aux_loss = balance.part(balance.load() if mini.expert_load is None else mini.expert_load)
        total = total + beside.balance.coef * aux_loss
        sums.mean("aux_loss", aux_loss.detach(), 0)
    _add_metrics(sums, loss, inputs, masks)
    return total, sums, torch.stack([inputs.logprobs.detach(), inputs.needed("entropy").detach()])


def model_outputs(
    model: CausalLM, row: PackedRow, spec: LossSpec, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ln p and entropy of the labels of a row, [M] each, and ln p of the whole vocabulary if the loss needs
    it."""
    if spec.reads_vocabulary:
        log_probs = model.row_distribution(row, temperature)
        return *chosen_and_entropy(log_probs, row.labels), log_probs
    return *model.row_logprobs(row, temperature), None


def _kl_per_token(
    kl: KLInLoss,
    ref_logprobs: Tensor | None,
    inputs: LossInputs,
    loss: PolicyLoss,
    row: PackedRow,
    reference: CausalLM | None,
    temperature: float,
) -> Tensor:
    """Compute the KL penalty at each token, [T] with gradient, before its weight beta."""
    if kl.kl_estimator == "exact":
        if inputs.log_probs is None or reference is None:
            raise DataError("kl_estimator=exact compares whole distributions; give the reference in SideModels")
        with torch.no_grad():
            theirs = reference.row_distribution(followed(reference, row), temperature)
        return exact_kl(inputs.log_probs, theirs, inputs.mask)
    if ref_logprobs is None:
        raise DataError("a KL penalty in the loss needs the column ref_logprobs; score the batch with the reference")
    # Where the mask is off both are 0: -inf less -inf, or an overflow of exp, would reach the gradient as NaN.
    mine, theirs = (_masked(column, inputs.mask) for column in (inputs.logprobs, ref_logprobs))
    estimate = kl_estimate(mine, theirs, kl.kl_estimator)
    return estimate * loss.weight if kl.use_bias_correction_kl else estimate


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Set values to 0 where the mask is off: a product would let NaN and infinity through, into the gradient too.
    values: [..., M]; mask: bool [M]."""
    return torch.where(mask, values, torch.zeros_like(values))


def _add_metrics(sums: MetricSums, loss: PolicyLoss, inputs: LossInputs, masks: Masks) -> None:
    """Add the metrics of a micro-batch. None is read here: the numbers stay on the device."""
    mask, rows, num_rows = inputs.mask, inputs.rows, inputs.num_rows
    if not masks.num_tokens:
        return
    clipped = {"low": loss.clipped_low, "high": loss.clipped_high, "region": loss.clipped_low | loss.clipped_high}
    shares = {side: row_mean(which.float(), mask, rows, num_rows) for side, which in clipped.items()}
    present = row_sum(mask.float(), rows, num_rows) > 0
    columns = {
        "entropy": inputs.needed("entropy"),
        "ratio/mean": loss.ratio,
        "advantages/zero_share": inputs.advantages == 0,
    }
    names = {f"clip_ratio/{side}_mean": side for side in clipped}
    if loss.per_sample:
        totals = torch.stack([shares[side] for side in names.values()])
        sums.means(tuple(names), _masked(totals, present).sum(1), masks.num_samples)
    else:
        columns |= {name: clipped[side] for name, side in names.items()}
    columns |= loss.metrics
    stacked = torch.stack([column.detach().double() for column in columns.values()])
    sums.means(tuple(columns), _masked(stacked, mask).sum(1), masks.num_tokens)
    sums.low("clip_ratio/low_min", torch.where(present, shares["low"], torch.inf).min())
    sums.high("clip_ratio/high_max", torch.where(present, shares["high"], -torch.inf).max())
    sums.low("ratio/min", torch.where(mask, loss.ratio, torch.inf).min())
    sums.high("ratio/max", torch.where(mask, loss.ratio, -torch.inf).max())
