"""Routers of a batch: scores of the old policy as columns, those of the present one for the same experts, and how
often a mini-batch chooses each expert."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.controller import RankContext, mark_progress
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.balance import BalanceReading, ExpertLoad, LoadBalance
from hybrid_rl.models.router import RouterReading, Routers
from hybrid_rl.models.row import place_weights
from hybrid_rl.transfer import upload
from hybrid_rl.workers.plan import micro_batch
from hybrid_rl.workers.scoring import MicroBatches, token_columns


def router_columns(
    model: CausalLM, routers: Routers, batch: Batch, micro_batches: MicroBatches, temperature: float
) -> dict[str, Jagged]:
    """old_logprobs, with the K experts that each of L routers chose for the tokens, old_router_ids, and how likely they
    were, old_router_logprobs: [T, L*K] each."""

    def compute(micro: Batch) -> dict[str, Tensor]:
        row = PackedRow.of(micro["prompt_ids"], micro["completion_ids"], model.device)
        with routers.reading(row) as reading:
            logprobs = model.row_logprobs(row, temperature)[0].float()
        return {
            "old_logprobs": logprobs,
            "old_router_ids": reading.expert_ids.flatten(1),
            "old_router_logprobs": reading.logprobs.flatten(1),
        }

    return token_columns(batch, micro_batches, compute)


@contextmanager
def reading_old_experts(routers: Routers | None, batch: Batch, row: PackedRow) -> Iterator[RouterReading | None]:
    """Read what the routers say now of the experts in old_router_ids; None without routers to read."""
    if routers is None:
        yield None
        return
    (ids,) = upload([batch["old_router_ids"].values], row.token_ids.device)
    with routers.reading(row, ids.unflatten(1, (routers.num_layers, -1))) as reading:
        yield reading


@contextmanager
def reading_balance(
    balance: LoadBalance | None, batch: Batch, row: PackedRow, *, mask_truncated_completions: bool
) -> Iterator[BalanceReading | None]:
    """Read what the routers say of all tokens of the samples of a micro-batch that were scored; None without a
    load-balancing loss. As in TRL completions count that the length limit cut off, unless they are masked."""
    if balance is None:
        yield None
        return
    scored = (~batch["rewards"].isnan()).tolist()
    kept = [not (mask_truncated_completions and reason == "length") for reason in batch["finish_reason"]]
    weights = [(float(is_scored), float(is_scored and keep)) for is_scored, keep in zip(scored, kept, strict=True)]
    with balance.reading(row, place_weights(batch["prompt_ids"], batch["completion_ids"], weights)) as reading:
        yield reading


@torch.no_grad()
def expert_load(
    model: CausalLM,
    balance: LoadBalance,
    batch: Batch,
    micro_batches: MicroBatches,
    context: RankContext,
    *,
    mask_truncated_completions: bool,
) -> ExpertLoad:
    """How often the mini-batch of all ranks chooses each expert, on the model's device: a forward pass over all
    micro-batches of this rank. Collective."""
    total: ExpertLoad | None = None
    for rows in micro_batches:
        mark_progress()
        micro = micro_batch(batch, rows, model.idle_token)
        row = PackedRow.of(micro["prompt_ids"], micro["completion_ids"], model.device)
        with reading_balance(balance, micro, row, mask_truncated_completions=mask_truncated_completions) as reading:
            model.hidden_states(row.token_ids, row.positions, model.attention.context(row.layout, model.device))
        assert reading is not None
        total = reading.load() if total is None else total + reading.load()
    assert total is not None
    first, *others = context.gather(total.to("cpu"))
    return sum(others, first).to(model.device)
