"""What some policy losses want beside a micro-batch, and what is told of the gap between engine and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algos import CorrectionInputs, PolicyObjective, WholeMiniBatch
from hybrid_rl.algos.diagnostics import correction_diagnostics, gap_diagnostics
from hybrid_rl.algos.token_masks import entropy_quantile
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.metrics import MetricSums
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.experts.balance import ExpertLoad
from hybrid_rl.training.plan import Plan
from hybrid_rl.training.routing import reading_balance
from hybrid_rl.training.scoring import MicroBatches, token_columns
from hybrid_rl.training.step import Terms, loss_mask, mismatch_metrics, model_outputs


def prepared_column(
    batch: Batch, plan: Plan, config: TrainerConfig, context: RankContext, version: int
) -> Jagged | None:
    """What the policy loss wants to know of whole mini-batches, for this rank's tokens; None where it wants nothing.

    Samples are shown to it in the order of their trajectories, so that ranks and plans do not matter. Collective.
    """
    objective = config.policy_loss
    if type(objective).prepare is PolicyObjective.prepare:
        return None
    completions = batch["completion_ids"]
    place = completions.with_values(torch.arange(len(completions.values)))
    mask = completions.with_values(
        loss_mask(batch, mask_truncated_completions=config.algorithm.mask_truncated_completions)
    )
    columns = {"old_logprobs": batch["old_logprobs"], "advantages": batch["advantages"], "completion_mask": mask}
    mine = Batch({**columns, "trajectory": batch["trajectory"], "group": batch["group"]})
    column: Tensor | None = None
    for index, mini in enumerate(plan):
        rows = torch.tensor([row for micro in mini for row in micro], dtype=torch.int64)
        everywhere = context.gather(mine.select(rows))
        whole = Batch.concat(everywhere)
        order = whole["trajectory"].argsort()
        whole = whole.select(order)
        prepared = objective.prepare(
            WholeMiniBatch(
                old_logprobs=whole["old_logprobs"].values,
                advantages=whole["advantages"].values,
                mask=whole["completion_mask"].values,
                rows=whole["old_logprobs"].row_index(),
                num_rows=whole.num_samples,
                groups=whole["group"],
                seed=config.seed * 1_000_003 + version * 1009 + index,
            )
        )
        if prepared is None:
            return None
        if column is None:
            column = torch.zeros((len(completions.values), *prepared.shape[1:]))
        start = sum(part.num_samples for part in everywhere[: context.rank])
        position = order.argsort()[start : start + len(rows)]  # of my samples in the order of trajectories
        if len(rows):
            column[place.select(rows).values] = (
                whole["old_logprobs"].with_values(prepared.float()).select(position).values
            )
    return None if column is None else completions.with_values(column)


def rollout_gap(
    batch: Batch, logprobs: Tensor, config: TrainerConfig, context: RankContext, version: int
) -> MetricSums:
    """How far the trainer, before any update, is from the engine that sampled. logprobs: float32 [M], of all completion
    tokens of the batch. Collective."""
    mask = loss_mask(batch, mask_truncated_completions=False)
    rollout = batch["rollout_logprobs"].values
    sums = mismatch_metrics(logprobs, rollout, mask)
    versions = batch["policy_version"].values
    ages = torch.where(versions < 0, torch.zeros_like(versions), version - versions)
    columns = (logprobs, rollout, mask, ages, batch["completion_ids"].lengths)
    everywhere = context.gather(columns)
    if context.rank == 0:
        trainer, engine, on, age, lengths = (torch.cat(parts) for parts in zip(*everywhere, strict=True))
        rows = torch.arange(len(lengths)).repeat_interleave(lengths)
        found = gap_diagnostics(trainer, engine, on, rows, age, len(lengths))
        if config.correction.is_active:
            corrected = config.correction.weigh(CorrectionInputs(trainer, engine, on, rows, len(lengths), age))
            found |= correction_diagnostics(corrected, on, rows, len(lengths))
        for name, value in found.items():
            sums.mean(name, value, 1)
    return sums


def with_whole(model: CausalLM, batch: Batch, micro_batches: MicroBatches, terms: Terms, context: RankContext) -> Terms:
    """The terms with what must be known of the mini-batch of all ranks before its first backward pass: the entropy from
    which on tokens are in the policy loss (top_entropy_quantile), float64 [], and how often each expert is chosen (with
    a load-balancing loss), both on the model's device.

    One forward pass over all micro-batches of this rank for both, none if neither is wanted. Collective.
    """
    algorithm, loads = terms.config.algorithm, list[ExpertLoad]()
    wants_entropy, masks_truncated = algorithm.top_entropy_quantile < 1, algorithm.mask_truncated_completions
    if not wants_entropy and terms.balance is None:
        return terms

    def compute(micro: Batch) -> dict[str, Tensor]:
        row, found = PackedRow.of(micro["prompt_ids"], micro["completion_ids"], model.device), dict[str, Tensor]()
        with reading_balance(terms.balance, micro, row, mask_truncated_completions=masks_truncated) as reading:
            if wants_entropy:
                found["entropy"] = model_outputs(model, row, terms)[1].float()
            else:  # routers need no head
                model.hidden_states(row.token_ids, row.positions, model.attention.context(row.layout, model.device))
        if reading is not None:
            loads.append(reading.load())
        return found

    columns = token_columns(batch, micro_batches, compute)
    if terms.balance is not None:
        first, *others = context.gather(sum(loads[1:], loads[0]).to("cpu"))
        terms = replace(terms, expert_load=sum(others, first).to(model.device))
    if not wants_entropy:
        return terms
    rows = torch.tensor([row for micro in micro_batches for row in micro], dtype=torch.int64)
    mask = loss_mask(batch, mask_truncated_completions=masks_truncated)
    mine = columns["entropy"].select(rows).values[batch["completion_ids"].with_values(mask).select(rows).values]
    whole = torch.cat(context.gather(mine))
    everything = torch.ones_like(whole, dtype=torch.bool)
    least = entropy_quantile(whole, everything, algorithm.top_entropy_quantile, num_tokens=len(whole))
    return replace(terms, least_entropy=least.to(model.device))


class LearnedNumbers:
    """Numbers that a policy loss learns beside the model: the same on every rank, updated by Adam on the CPU.

    device: the model's. parameters: float64 [P], None if the loss learns none; on_device: the same numbers there, what
    losses are given and get their gradient from.
    """

    def __init__(self, objective: PolicyObjective, device: torch.device | str = "cpu") -> None:
        self.parameters: Tensor | None = None
        self.on_device: Tensor | None = None
        if objective.initial_parameters:
            self.parameters = torch.tensor(objective.initial_parameters, dtype=torch.float64).requires_grad_()
            self._adam = torch.optim.Adam([self.parameters], lr=objective.parameter_learning_rate)
            is_here = torch.device(device).type == "cpu"
            self.on_device = self.parameters if is_here else self.parameters.detach().to(device).requires_grad_()

    def clear(self) -> None:
        """Forget gradients: of what an update that was broken off left behind."""
        if self.parameters is not None and self.on_device is not None:
            self.parameters.grad = self.on_device.grad = None

    def step(self, context: RankContext, *, is_valid: bool) -> None:
        """One update from the gradients of all ranks' micro-batches. Collective. is_valid: False drops them, and
        leaves the numbers alone: without a token in the loss Adam's momentum alone would move them."""
        if self.parameters is None or self.on_device is None:
            return
        mine = torch.zeros_like(self.parameters) if self.on_device.grad is None else self.on_device.grad.cpu()
        total = torch.stack(context.gather(mine)).sum(0)
        if is_valid and bool(total.isfinite().all()):
            self.parameters.grad = total
            self._adam.step()
            self._send()
        self.clear()

    @torch.no_grad()
    def _send(self) -> None:
        if self.on_device is not None and self.parameters is not None and self.on_device is not self.parameters:
            self.on_device.copy_(self.parameters)

    def metrics(self) -> MetricSums:
        """Their present values."""
        sums = MetricSums()
        for index, value in enumerate([] if self.parameters is None else self.parameters.tolist()):
            sums.mean(f"policy_loss/parameter_{index}", value, 1)
        return sums

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain numbers."""
        if self.parameters is None:
            return {}
        state = self._adam.state_dict()["state"]
        moments = {name: value.tolist() for name, value in state[0].items()} if state else {}
        return {"parameters": self.parameters.tolist(), "adam": moments}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        if self.parameters is None:
            return
        self.parameters.copy_(torch.tensor(state["parameters"], dtype=torch.float64))
        for name, value in state["adam"].items():
            dtype = torch.float32 if name == "step" else torch.float64
            self._adam.state[self.parameters][name] = torch.tensor(value, dtype=dtype)
        self._send()
