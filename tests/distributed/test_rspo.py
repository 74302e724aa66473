"""Router scores on shards: the columns, the loss and the gradient of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.router import Routers
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.router_scores import router_columns
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, accumulating, device_mesh, shard
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels
from tests.distributed.ranks import run_ranks
from tests.unit.training.test_rspo import config_of, moe, rollout

SPLIT = [[[0, 1, 2], [4, 3], [5, 6, 7, 8, 9]], [[10, 11, 12], [13, 14, 15], []]]
COLUMNS = ("old_logprobs", "old_router_ids", "old_router_logprobs")


def step(model: CausalLM, micro_batches: list[list[int]]) -> tuple[Batch, float, float]:
    """Score, move the weights, and run the backward passes: the scored batch, the loss, the mean shift."""
    config, routers = config_of(loss_options={"router_shift_floor": 0.5}), Routers(model)
    batch = rollout()
    batch = batch.with_columns(**router_columns(model, routers, batch, micro_batches))
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.15)
    spec, total, shift = LossSpec.of(config), 0.0, 0.0
    mini, beside = MiniBatch.of(batch, spec), SideModels(routers=routers)
    for index, rows in enumerate(micro_batches):
        with accumulating(model, is_last=index == len(micro_batches) - 1):
            loss, sums, _ = micro_batch_loss(model, micro_batch(batch, rows), spec, mini, beside)
            loss.backward()
        total += float(loss.detach())
        if rows:
            lengths = batch["completion_ids"].lengths[torch.tensor(rows)]
            shift += sums.result()["router_shift/mean"] * int(lengths.sum()) / mini.counts.num_tokens
    return batch, total, shift


def on_ranks(rank: int, num_ranks: int, checkpointing: bool) -> dict[str, Any]:
    options = ShardOptions(1, num_ranks, torch.float32)
    module = moe()
    model = ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options))
    if checkpointing:
        model.enable_gradient_checkpointing()
    batch, loss, shift = step(model, SPLIT[rank])
    rows = [row for rows in SPLIT[rank] for row in rows]
    columns = {name: batch[name].select(torch.tensor(rows)).values for name in COLUMNS}
    gradients = {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}
    return {"rows": rows, "columns": columns, "gradients": gradients, "loss": loss, "shift": shift}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shards_give_what_one_process_gives(checkpointing: bool) -> None:
    model = CausalLM(moe())
    batch, loss, shift = step(model, [list(range(16))])
    results = run_ranks(on_ranks, 2, checkpointing)
    for result in results:
        for name, found in result["columns"].items():
            expected = batch[name].select(torch.tensor(result["rows"])).values
            torch.testing.assert_close(found, expected, rtol=0, atol=0 if name == "old_router_ids" else 2e-6)
        for name, parameter in model.module.named_parameters():
            torch.testing.assert_close(result["gradients"][name], parameter.grad, rtol=0, atol=2e-6)
    assert sum(result["loss"] for result in results) == pytest.approx(loss, abs=1e-6)
    assert sum(result["shift"] for result in results) == pytest.approx(shift, abs=1e-6) and shift < 0.97
