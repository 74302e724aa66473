"""Router scores of a batch: those of the old policy as columns, and those of the present one for the same experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.models import CausalLM, PackedRow
from hybrid_rl.models.router import RouterReading, Routers
from hybrid_rl.transfer import upload
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
