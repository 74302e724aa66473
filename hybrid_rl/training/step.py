"""The arithmetic of a training step on one rank: a micro-batch's share of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algos import (
    CorrectionInputs,
    KLInLoss,
    LossInputs,
    Needs,
    PolicyLoss,
    kl_estimate,
    row_mean,
    token_weights,
)
from hybrid_rl.algos.kl import exact_kl
from hybrid_rl.algos.masked import row_sum
from hybrid_rl.algos.token_masks import entropy_quantile, off_policy_mask
from hybrid_rl.batch import Batch
from hybrid_rl.config import AlgorithmConfig, TrainerConfig
from hybrid_rl.errors import DataError
from hybrid_rl.metrics import MetricSums
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.experts.balance import ExpertLoad, LoadBalance
from hybrid_rl.models.experts.router import Routers
from hybrid_rl.models.heads.distribution import chosen_and_entropy
from hybrid_rl.tensors.transfer import upload
from hybrid_rl.training.routing import reading_balance, reading_old_experts


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
    the KL is taken over the whole vocabulary; routers: of the policy, where the loss needs their scores; balance: of
    experts, where that is part of the loss; expert_load, and least_entropy of a token in the policy loss (float64 []):
    of the whole mini-batch, None = the micro-batch is all of it; entropy_coef: present weight, None = as configured.
    """

    config: TrainerConfig
    beta: float = 0.0
    version: int = 0
    parameters: Tensor | None = None
    reference: CausalLM | None = None
    routers: Routers | None = None
    balance: LoadBalance | None = None
    expert_load: ExpertLoad | None = None
    least_entropy: Tensor | None = None
    entropy_coef: float | None = None

    @property
    def is_exact_kl(self) -> bool:
        """Whether the KL in the loss is that of whole distributions."""
        return isinstance(self.config.kl, KLInLoss) and self.config.kl.kl_estimator == "exact"


def micro_batch_loss(model: CausalLM, batch: Batch, terms: Terms, counts: Counts) -> tuple[Tensor, MetricSums, Tensor]:
    """This micro-batch's part of the mini-batch's loss: a scalar to call backward on; the parts add up to the loss.

    Returns the loss, sums for the metrics, and the detached logprobs [M]. Without a column old_logprobs the learner's
    own are used, detached: the ratio is 1 and carries the gradient.
    """
    config, algorithm = terms.config, terms.config.algorithm
    row = PackedRow.of(batch["prompt_ids"], batch["completion_ids"], model.device)
    masks_truncated = algorithm.mask_truncated_completions
    with (
        reading_old_experts(terms.routers, batch, row) as reading,
        reading_balance(terms.balance, batch, row, mask_truncated_completions=masks_truncated) as balance,
    ):
        logprobs, entropy, log_probs = model_outputs(model, row, terms)
    masks = Masks.of(batch, algorithm)
    inputs, extra = loss_inputs(
        batch, row, (logprobs, entropy), masks, terms, log_probs, None if reading is None else reading.logprobs
    )
    mask = inputs.mask
    loss = config.policy_loss.loss(inputs)
    if not isinstance(loss, PolicyLoss):
        name = type(config.policy_loss).__name__
        raise TypeError(f"{name}.loss gave a {type(loss).__name__}; it must return a hybrid_rl.algos.PolicyLoss")
    per_token, sums = loss.per_token, MetricSums()
    if algorithm.off_policy_mask_threshold is not None:
        near = off_policy_mask(
            *(
                inputs.logprobs,
                inputs.needed("rollout_logprobs"),
                inputs.advantages,
                mask,
                inputs.rows,
                inputs.num_rows,
            ),
            threshold=algorithm.off_policy_mask_threshold,
        )
        per_token = _masked(per_token, near)
        sums.mean("mismatch/off_policy_masked", (mask & ~near).sum(), masks.num_tokens)
    if algorithm.top_entropy_quantile < 1:
        least = terms.least_entropy
        if least is None:
            least = entropy_quantile(entropy, mask, algorithm.top_entropy_quantile, num_tokens=masks.num_tokens)
        is_high = entropy.detach().double() >= least
        per_token, entropy = _masked(per_token, is_high), _masked(entropy, is_high)
        sums.mean("top_entropy/tokens", (mask & is_high).sum(), masks.num_tokens)
        sums.mean("top_entropy/part_of_entropy", _masked(entropy.detach(), mask).sum(), masks.num_tokens)
    if config.correction.is_active:
        corrected = config.correction.weigh(correction_inputs(inputs))
        per_token = per_token * corrected.weights
        sums.mean("mismatch/mean_weight", _masked(corrected.weights, mask).sum(), masks.num_tokens)
    if isinstance(config.kl, KLInLoss):
        kl = _kl_per_token(config.kl, extra.ref_logprobs, inputs, loss, row, terms)
        per_token = per_token + terms.beta * kl
        sums.mean("kl", _masked(kl.detach(), mask).sum(), masks.num_tokens)
    coef = algorithm.entropy_coef if terms.entropy_coef is None else terms.entropy_coef
    if coef:
        per_token = per_token - coef * entropy
    weights = token_weights(
        mask,
        inputs.rows,
        inputs.num_rows,
        algorithm.loss_type,
        num_tokens=counts.num_tokens,
        num_samples=counts.num_samples,
        max_completion_length=config.rollout.max_completion_length,
    )
    total = (weights * _masked(per_token, mask)).sum()
    if algorithm.positive_nll_coef:
        nll = -_masked(logprobs, extra.positive).sum() / max(counts.num_positive_tokens, 1)
        total = total + algorithm.positive_nll_coef * nll
    if terms.balance is not None and balance is not None:
        aux_loss = balance.part(balance.load() if terms.expert_load is None else terms.expert_load)
        total = total + terms.balance.coef * aux_loss
        sums.mean("aux_loss", aux_loss.detach(), 0)
    _add_metrics(sums, loss, inputs, masks)
    return total, sums, inputs.logprobs.detach()


def model_outputs(model: CausalLM, row: PackedRow, terms: Terms) -> tuple[Tensor, Tensor, Tensor | None]:
    """ln p and entropy of the labels of a row, [M] each, and where the loss needs it ln p of the whole vocabulary."""
    temperature = terms.config.rollout.temperature
    if terms.is_exact_kl or Needs.LOG_PROBS in terms.config.policy_loss.needs:
        log_probs = model.row_distribution(row, temperature)
        return *chosen_and_entropy(log_probs, row.labels), log_probs
    return *model.row_logprobs(row, temperature), None


@dataclass(frozen=True)
class Masks:
    """Which completion tokens of a micro-batch take part in what, on the host, where counting them waits for no device.

    loss: bool [M], tokens in the loss; positive: bool [M], those of samples with a positive reward. num_tokens and
    num_samples: tokens in the loss and samples that have any.
    """

    loss: Tensor
    positive: Tensor
    num_tokens: int
    num_samples: int

    @classmethod
    def of(cls, batch: Batch, config: AlgorithmConfig) -> Masks:
        """From the columns of the micro-batch."""
        mask, rows = loss_mask(batch, mask_truncated_completions=config.mask_truncated_completions), _rows(batch)
        num_samples = int(torch.bincount(rows[mask], minlength=1).count_nonzero())
        return cls(mask, mask & (batch["rewards"] > 0)[rows], int(mask.sum()), num_samples)


@dataclass(frozen=True)
class ExtraColumns:
    """What some terms of the loss need beside `LossInputs`, on the device: [M]. positive: bool, as in `Masks`."""

    positive: Tensor
    ref_logprobs: Tensor | None


def loss_inputs(
    batch: Batch,
    row: PackedRow,
    model_outputs: tuple[Tensor, Tensor],
    masks: Masks,
    terms: Terms,
    log_probs: Tensor | None = None,
    router_logprobs: Tensor | None = None,
) -> tuple[LossInputs, ExtraColumns]:
    """The columns of a micro-batch as a policy loss takes them, and those of further terms, sent to the device of the
    logprobs in one copy. row: the packed micro-batch; model_outputs: ln p and entropy of its labels."""
    logprobs, entropy = model_outputs
    names = ("advantages", "old_logprobs", "rollout_logprobs", "policy_version", "prepared", "ref_logprobs")
    columns = {name: batch[name].values for name in (*names, "old_top_ids", "old_top_logprobs") if name in batch}
    if router_logprobs is not None:
        columns["old_router_logprobs"] = batch["old_router_logprobs"].values
    versions = columns.get("policy_version")
    columns |= {"mask": masks.loss, "positive": masks.positive, "rows": _rows(batch)}
    there = dict(zip(columns, upload(list(columns.values()), logprobs.device), strict=True))
    own, old_router = logprobs.detach(), there.get("old_router_logprobs")
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=there.get("old_logprobs", own),
        advantages=there["advantages"],
        mask=there["mask"],
        rows=there["rows"],
        num_rows=batch.num_samples,
        entropy=entropy,
        rollout_logprobs=there.get("rollout_logprobs", own),
        token_versions=there.get("policy_version"),
        version=terms.version,
        newest_version=None if versions is None or not len(versions) else int(versions.max()),
        prepared=there.get("prepared"),
        log_probs=log_probs,
        token_ids=row.labels,
        old_top_ids=there.get("old_top_ids"),
        old_top_logprobs=there.get("old_top_logprobs"),
        router_logprobs=router_logprobs,
        old_router_logprobs=None if router_logprobs is None else old_router.view_as(router_logprobs),  # type: ignore[union-attr]
        parameters=None if terms.parameters is None else terms.parameters.to(logprobs.device),
    )
    return inputs, ExtraColumns(there["positive"], there.get("ref_logprobs"))


def _rows(batch: Batch) -> Tensor:
    """The sample of each completion token, int64 [M]."""
    rows: Tensor = batch["completion_ids"].row_index()
    return rows


def correction_inputs(inputs: LossInputs) -> CorrectionInputs:
    """The same tokens as a correction takes them."""
    versions = inputs.token_versions
    ages = torch.zeros_like(inputs.rows) if versions is None else (inputs.version - versions).clamp(min=0)
    if versions is not None:
        ages = torch.where(versions < 0, torch.zeros_like(ages), ages)  # made by no policy
    return CorrectionInputs(
        inputs.old_logprobs, inputs.needed("rollout_logprobs"), inputs.mask, inputs.rows, inputs.num_rows, ages
    )


def _kl_per_token(
    kl: KLInLoss, ref_logprobs: Tensor | None, inputs: LossInputs, loss: PolicyLoss, row: PackedRow, terms: Terms
) -> Tensor:
    """The KL penalty at each token, [T] with gradient, before its weight beta."""
    if terms.is_exact_kl:
        assert inputs.log_probs is not None and terms.reference is not None
        with torch.no_grad():
            reference = terms.reference.row_distribution(row, terms.config.rollout.temperature)
        return exact_kl(inputs.log_probs, reference, inputs.mask)
    if ref_logprobs is None:
        raise DataError("a KL penalty in the loss needs the column ref_logprobs; score the batch with the reference")
    # Where the mask is off both are 0: -inf less -inf, or an overflow of exp, would reach the gradient as NaN.
    mine, theirs = (_masked(column, inputs.mask) for column in (inputs.logprobs, ref_logprobs))
    estimate = kl_estimate(mine, theirs, kl.kl_estimator)
    return estimate * loss.weight if kl.use_bias_correction_kl else estimate


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values, 0 where the mask is off: a product would let what is not finite there through, into the gradient too.
    values: [..., M]; mask: bool [M]."""
    return torch.where(mask, values, torch.zeros_like(values))


def _add_metrics(sums: MetricSums, loss: PolicyLoss, inputs: LossInputs, masks: Masks) -> None:
    """What is logged of a micro-batch. Nothing of it is read here: the numbers stay on the device."""
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


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> MetricSums:
    """How far the engine's logprobs are from the trainer's, on the sampled tokens. All [M]; both before any update.

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
