"""Routers of a batch: scores of the old policy as columns, and those of the present one, of the same experts or all."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from hybrid_rl.batch import TRUNCATIONS, Batch, Jagged
from hybrid_rl.batch.temperature import sampling_temperature
from hybrid_rl.memory.shortage import Halvings
from hybrid_rl.memory.transfer import upload
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.packed.load_balance import BalanceReading, LoadBalance
from hybrid_rl.models.packed.router import RouterReading, Routers
from hybrid_rl.models.row import place_weights
from hybrid_rl.training.routing_replay import experts_of, row_of
from hybrid_rl.training.scoring import MicroBatches, token_columns
from hybrid_rl.training.spec import LossSpec


def router_columns(
    model: CausalLM, routers: Routers, batch: Batch, micro_batches: MicroBatches, halvings: Halvings | None = None
) -> dict[str, Jagged]:
    """Compute old_logprobs, with the K experts that each of L routers chose for the tokens, old_router_ids, and how
    likely they were, old_router_logprobs: [T, L*K] each."""

    def compute(micro: Batch) -> dict[str, Tensor]:
        row = row_of(model, micro)
        with routers.reading(row) as reading:
            logprobs = model.row_logprobs(row, sampling_temperature(micro))[0].float()
        return {
            "old_logprobs": logprobs,
            "old_router_ids": reading.expert_ids.flatten(1),
            "old_router_logprobs": reading.logprobs.flatten(1),
        } | experts_of(model, micro, row)

    return token_columns(batch, micro_batches, compute, halvings)


def reading_old_experts(
    routers: Routers | None, batch: Batch, row: PackedRow
) -> AbstractContextManager[RouterReading | None]:
    """Read the present scores of the experts in old_router_ids inside the block; None without routers to read."""
    if routers is None:
        return nullcontext()
    (ids,) = upload([batch["old_router_ids"].values], row.token_ids.device)
    return routers.reading(row, ids.unflatten(1, (routers.num_layers, -1)))


def reading_balance(
    balance: LoadBalance | None, batch: Batch, row: PackedRow, spec: LossSpec
) -> AbstractContextManager[BalanceReading | None]:
    """Read the scores of all tokens of the samples of a micro-batch that have a reward, inside the block; None without
    a load-balancing loss. As in TRL, tokens that the policy did not make count, those of the prompt and those of the
    environment: experts compute them all. So do completions that a limit cut off, unless they are masked."""
    if balance is None:
        return nullcontext()
    scored = (~batch["rewards"].isnan()).tolist()
    masked = TRUNCATIONS if spec.algorithm.mask_truncated_completions else ()
    kept = [reason not in masked for reason in batch["finish_reason"]]
    weights = [(float(is_scored), float(is_scored and keep)) for is_scored, keep in zip(scored, kept, strict=True)]
    return balance.reading(row, place_weights(row, batch["prompt_ids"], weights))
