"""The load-balancing loss on shards: the loss and gradient of one process, and experts in bfloat16 on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.load_balance import LoadBalance
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.mini_batch import look_ahead
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, accumulating, device_mesh, shard
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels
from tests.distributed.ranks import run_ranks
from tests.unit.models.test_verify import many_experts
from tests.unit.training.grpo_step import case_batch, case_config, with_advantages
from tests.unit.training.test_load_balance import COEF, moe, step

SPLIT = [[[0, 1, 2], [4, 3], [5, 6, 7, 8, 9]], [[10, 11, 12], [13, 14, 15], []]]


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def sharded(module: Any, num_ranks: int, dtype: torch.dtype) -> ShardedCausalLM:
    options = ShardOptions(1, num_ranks, dtype)
    return ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options))


def on_ranks(rank: int, num_ranks: int, checkpointing: bool) -> dict[str, Any]:
    module = moe("Qwen3Moe")
    model = sharded(module, num_ranks, torch.float32)
    if checkpointing:
        model.enable_gradient_checkpointing()
    batch, config = with_advantages(case_batch()), case_config(loss_type="dapo")
    balance = LoadBalance.of(model, COEF)
    assert balance is not None
    context = RankContext(rank=rank, mesh=RankMesh(dp_shard=num_ranks), gather=gathered)
    spec = LossSpec.of(config)
    mini = look_ahead(model, batch, SPLIT[rank], spec, MiniBatch.of(batch, spec), balance, context)
    beside = SideModels(balance=balance)
    total = aux_loss = 0.0
    for index, rows in enumerate(SPLIT[rank]):
        with accumulating(model, is_last=index == len(SPLIT[rank]) - 1):
            loss, sums, _ = micro_batch_loss(model, micro_batch(batch, rows, model.idle_token), spec, mini, beside)
            loss.backward()
        total, aux_loss = total + float(loss.detach()), aux_loss + sums.parts("aux_loss")[0]
    gradients = [parameter.grad.full_tensor().flatten() for parameter in module.parameters()]
    return {"loss": total, "aux_loss": aux_loss, "gradient": torch.cat(gradients)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shards_give_what_one_process_gives(checkpointing: bool) -> None:
    loss, gradient, aux_loss = step(CausalLM(moe("Qwen3Moe")), with_advantages(case_batch()), COEF)
    results = run_ranks(on_ranks, 2, checkpointing)
    assert sum(result["loss"] for result in results) == pytest.approx(loss, abs=1e-6)
    assert sum(result["aux_loss"] for result in results) == pytest.approx(aux_loss, abs=1e-6)
    for result in results:
        torch.testing.assert_close(result["gradient"], gradient, rtol=0, atol=2e-6)


def verified(rank: int, num_ranks: int) -> float:
    return sharded(many_experts(1), num_ranks, torch.bfloat16).verify()


def test_experts_in_bfloat16_pass_the_check_on_two_ranks() -> None:
    assert all(gap < 0.1 for gap in run_ranks(verified, 2))
