"""The columns of a micro-batch as policy losses and corrections take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algos import CorrectionInputs, LossInputs
from hybrid_rl.batch import Batch
from hybrid_rl.memory.transfer import upload
from hybrid_rl.models import PackedRow
from hybrid_rl.training.spec import LossSpec, MiniBatch


@dataclass(frozen=True)
class Masks:
    """The completion tokens of a micro-batch that take part in each term, on the host, so that counting waits for no
    device.

    loss: bool [M], tokens in the loss; positive: bool [M], those of samples with a positive reward. num_tokens and
    num_samples: tokens in the loss and samples that have any.
    """

    loss: Tensor
    positive: Tensor
    num_tokens: int
    num_samples: int

    @classmethod
    def of(cls, batch: Batch, spec: LossSpec) -> Masks:
        """Find them from the columns of a micro-batch."""
        mask, rows = spec.mask(batch), _rows(batch)
        num_samples = int(torch.bincount(rows[mask], minlength=1).count_nonzero())
        return cls(mask, mask & (batch["rewards"] > 0)[rows], int(mask.sum()), num_samples)


@dataclass(frozen=True)
class ExtraColumns:
    """Columns that some terms of the loss need in addition to `LossInputs`, on the device: [M]. positive: bool, as in
    `Masks`. trajectory_tokens: int64 [N], tokens in the loss of the trajectory of each sample, None if every sample is
    one."""

    positive: Tensor
    ref_logprobs: Tensor | None
    trajectory_tokens: Tensor | None


def loss_inputs(
    batch: Batch,
    row: PackedRow,
    model_outputs: tuple[Tensor, Tensor],
    masks: Masks,
    mini: MiniBatch,
    log_probs: Tensor | None = None,
    router_logprobs: Tensor | None = None,
) -> tuple[LossInputs, ExtraColumns]:
    """Return the columns of a micro-batch as a policy loss takes them, and those of further terms, sent to the device
    of the logprobs in one copy. row: the packed micro-batch; model_outputs: ln p and entropy of its labels."""
    logprobs, entropy = model_outputs
    names = ("advantages", "old_logprobs", "rollout_logprobs", "policy_version", "prepared", "ref_logprobs")
    columns = {name: batch[name].values for name in (*names, "old_top_ids", "old_top_logprobs") if name in batch}
    if router_logprobs is not None:
        columns["old_router_logprobs"] = batch["old_router_logprobs"].values
    if "trajectory_tokens" in batch:
        columns["trajectory_tokens"] = batch["trajectory_tokens"]
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
        version=mini.version,
        newest_version=None if versions is None or not len(versions) else int(versions.max()),
        prepared=there.get("prepared"),
        log_probs=log_probs,
        token_ids=row.labels,
        old_top_ids=there.get("old_top_ids"),
        old_top_logprobs=there.get("old_top_logprobs"),
        router_logprobs=router_logprobs,
        old_router_logprobs=None if router_logprobs is None else old_router.view_as(router_logprobs),  # type: ignore[union-attr]
        parameters=None if mini.parameters is None else mini.parameters.to(logprobs.device),
    )
    return inputs, ExtraColumns(there["positive"], there.get("ref_logprobs"), there.get("trajectory_tokens"))


def correction_inputs(inputs: LossInputs) -> CorrectionInputs:
    """Return the same tokens as a correction takes them."""
    versions = inputs.token_versions
    ages = torch.zeros_like(inputs.rows)
    if versions is not None:  # below 0: made by no policy
        ages = torch.where(versions < 0, ages, (inputs.version - versions).clamp(min=0))
    return CorrectionInputs(
        inputs.old_logprobs, inputs.needed("rollout_logprobs"), inputs.mask, inputs.rows, inputs.num_rows, ages
    )


def _rows(batch: Batch) -> Tensor:
    """Return the sample of each completion token, int64 [M]."""
    rows: Tensor = batch["completion_ids"].row_index()
    return rows
