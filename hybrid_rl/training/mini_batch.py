"""Numbers of a whole mini-batch, over all ranks, that its losses need before the first backward pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybrid_rl.algos import PolicyObjective, WholeMiniBatch
from hybrid_rl.algos.masked import entropy_quantile
from hybrid_rl.batch import Batch, Jagged, Trajectories
from hybrid_rl.batch.temperature import sampling_temperature
from hybrid_rl.batch.trajectories import key_order
from hybrid_rl.controller import RankContext
from hybrid_rl.memory.shortage import Halvings
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.load_balance import ExpertLoad, LoadBalance
from hybrid_rl.training.batch_plan import Plan, sample_rows
from hybrid_rl.training.loss import model_outputs
from hybrid_rl.training.router_scores import reading_balance
from hybrid_rl.training.routing_replay import row_of
from hybrid_rl.training.scoring import MicroBatches, token_columns
from hybrid_rl.training.spec import Counts, LossSpec, MiniBatch


def joined_counts(batch: Batch, plan: Plan, spec: LossSpec, context: RankContext) -> list[Counts]:
    """Count the denominators of each mini-batch over all ranks. Collective."""
    mine = [Counts.of(batch.select(sample_rows(mini)), spec) for mini in plan]
    return [Counts(*map(sum, zip(*parts, strict=True))) for parts in zip(*context.data_gather(mine), strict=True)]


def with_trajectory_tokens(batch: Batch, spec: LossSpec) -> Batch:
    """Add how many tokens in the loss the trajectory of each sample has, if one has several turns: a micro-batch may
    hold some of them only. Needs whole trajectories."""
    trajectories = Trajectories.of(batch)
    if trajectories.num_trajectories == batch.num_samples:
        return batch
    mask, trajectory = spec.mask(batch), trajectories.index[batch["completion_ids"].row_index()]
    return batch.with_columns(
        trajectory_tokens=trajectory[mask].bincount(minlength=trajectories.num_trajectories)[trajectories.index]
    )


def prepared_column(batch: Batch, plan: Plan, spec: LossSpec, context: RankContext, *, seed: int) -> Jagged | None:
    """Ask the policy loss for what it must know of whole mini-batches, for this rank's tokens; None for a loss that
    needs nothing of them.

    Trajectories are shown to it in order, each as one row with its turns side by side, so that ranks, plans and the
    number of samples that it was cut into do not matter. seed: of the first mini-batch, the next ones follow.
    Collective.
    """
    objective = spec.policy_loss
    if type(objective).prepare is PolicyObjective.prepare:
        return None
    completions = batch["completion_ids"]
    place = completions.with_values(torch.arange(len(completions.values)))
    names = ("old_logprobs", "advantages", "trajectory", "turn", "group")
    columns = {name: batch[name] for name in names if name in batch}
    mine = Batch(columns | {"completion_mask": completions.with_values(spec.mask(batch))})
    column: Tensor | None = None
    for index, mini in enumerate(plan):
        rows = sample_rows(mini)
        everywhere = context.data_gather(mine.select(rows))
        whole = Batch.concat(everywhere)
        order = key_order(whole)
        whole = whole.select(order)
        trajectories = Trajectories.of(whole)
        prepared = objective.prepare(
            WholeMiniBatch(
                old_logprobs=whole["old_logprobs"].values,
                advantages=whole["advantages"].values,
                mask=whole["completion_mask"].values,
                rows=trajectories.index[whole["old_logprobs"].row_index()],
                num_rows=trajectories.num_trajectories,
                groups=whole["group"][trajectories.first],
                seed=seed + index,
            )
        )
        if prepared is None:
            return None
        if column is None:
            column = torch.zeros((len(completions.values), *prepared.shape[1:]))
        start = sum(part.num_samples for part in everywhere[: context.data_rank])
        position = order.argsort()[start : start + len(rows)]  # of my samples in that order
        if len(rows):
            column[place.select(rows).values] = (
                whole["old_logprobs"].with_values(prepared.float()).select(position).values
            )
    return None if column is None else completions.with_values(column)


def look_ahead(
    model: CausalLM,
    batch: Batch,
    micro_batches: MicroBatches,
    spec: LossSpec,
    mini: MiniBatch,
    balance: LoadBalance | None,
    context: RankContext,
    *,
    halvings: Halvings | None = None,
) -> MiniBatch:
    """Find what losses must know of the mini-batch of all ranks before its first backward pass: the least entropy of
    tokens in the policy loss (top_entropy_quantile), float64 [], and how often each expert is chosen (with a
    load-balancing loss), both on the model's device.

    One forward pass over all micro-batches of this rank for both, none if neither is needed. Collective.
    """
    loads = list[ExpertLoad]()
    if not spec.has_entropy_threshold and balance is None:
        return mini

    def compute(micro: Batch) -> dict[str, Tensor]:
        row, values = row_of(model, micro), dict[str, Tensor]()
        with reading_balance(balance, micro, row, spec) as reading:
            if spec.has_entropy_threshold:
                values["entropy"] = model_outputs(model, row, spec, sampling_temperature(micro))[1].float()
            else:  # routers need no head
                model.run_row(row)
        if reading is not None:
            loads.append(reading.load())
        return values

    columns = token_columns(batch, micro_batches, compute, halvings)
    if balance is not None:
        first, *others = context.data_gather(sum(loads[1:], loads[0]).to("cpu"))
        mini = replace(mini, expert_load=sum(others, first).to(model.device))
    if not spec.has_entropy_threshold:
        return mini
    rows = sample_rows(micro_batches)
    mask = spec.mask(batch)
    mine = columns["entropy"].select(rows).values[batch["completion_ids"].with_values(mask).select(rows).values]
    whole = torch.cat(context.data_gather(mine))
    everything = torch.ones_like(whole, dtype=torch.bool)
    least = entropy_quantile(whole, everything, spec.algorithm.top_entropy_quantile, num_tokens=len(whole))
    return replace(mini, least_entropy=least.to(model.device))
