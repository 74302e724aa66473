"""Losses that read routers (RSPO, load balance) on shards: the columns, losses and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_rl.batch import Batch
from hybrid_rl.models import CausalLM
from hybrid_rl.models.packed.load_balance import LoadBalance
from hybrid_rl.models.packed.router import Routers
from hybrid_rl.training.batch_plan import micro_batch
from hybrid_rl.training.loss import micro_batch_loss
from hybrid_rl.training.mini_batch import look_ahead
from hybrid_rl.training.router_scores import router_columns
from hybrid_rl.training.sharding.fsdp import accumulating
from hybrid_rl.training.spec import LossSpec, MiniBatch, SideModels
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import context_of, sharded
from tests.unit.models.test_verify import many_experts
from tests.unit.training import test_load_balance, test_rspo
from tests.unit.training.grpo_step import case_batch, case_config, with_advantages

pytestmark = pytest.mark.slow

SPLIT = [[[0, 1, 2], [4, 3], [5, 6, 7, 8, 9]], [[10, 11, 12], [13, 14, 15], []]]
COLUMNS = ("old_logprobs", "old_router_ids", "old_router_logprobs")


def rspo_step(model: CausalLM, micro_batches: list[list[int]]) -> tuple[Batch, float, float]:
    """Score, move the weights, and run the backward passes: the scored batch, the loss, the mean shift."""
    config, routers = test_rspo.config_of(loss_options={"router_shift_floor": 0.5}), Routers(model)
    batch = test_rspo.rollout()
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


def rspo_on_a_rank(rank: int, checkpointing: bool) -> dict[str, Any]:
    module = test_rspo.moe()
    model = sharded(module)
    if checkpointing:
        model.enable_gradient_checkpointing()
    batch, loss, shift = rspo_step(model, SPLIT[rank])
    rows = [row for rows in SPLIT[rank] for row in rows]
    columns = {name: batch[name].select(torch.tensor(rows)).values for name in COLUMNS}
    gradients = {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}
    return {"rows": rows, "columns": columns, "gradients": gradients, "loss": loss, "shift": shift}


def balance_on_a_rank(rank: int, num_ranks: int, checkpointing: bool) -> dict[str, Any]:
    module = test_load_balance.moe("Qwen3Moe")
    model = sharded(module)
    if checkpointing:
        model.enable_gradient_checkpointing()
    batch, config = with_advantages(case_batch()), case_config(loss_type="dapo")
    balance = LoadBalance.of(model, test_load_balance.COEF)
    assert balance is not None
    spec = LossSpec.of(config)
    mini = MiniBatch.of(batch, spec)
    mini = look_ahead(model, batch, SPLIT[rank], spec, mini, balance, context_of(rank, num_ranks))
    beside = SideModels(balance=balance)
    total = aux_loss = 0.0
    for index, rows in enumerate(SPLIT[rank]):
        with accumulating(model, is_last=index == len(SPLIT[rank]) - 1):
            loss, sums, _ = micro_batch_loss(model, micro_batch(batch, rows, model.idle_token), spec, mini, beside)
            loss.backward()
        total, aux_loss = total + float(loss.detach()), aux_loss + sums.parts("aux_loss")[0]
    gradients = [parameter.grad.full_tensor().flatten() for parameter in module.parameters()]
    return {"loss": total, "aux_loss": aux_loss, "gradient": torch.cat(gradients)}


def on_a_rank(rank: int, num_ranks: int) -> dict[Any, Any]:
    """By loss and whether activations are checkpointed; and the gap at the start of a model in bfloat16."""
    found: dict[Any, Any] = {"gap": sharded(many_experts(1), torch.bfloat16).verify()}
    for checkpointing in (False, True):
        found["rspo", checkpointing] = rspo_on_a_rank(rank, checkpointing)
        found["balance", checkpointing] = balance_on_a_rank(rank, num_ranks, checkpointing)
    return found


def test_shards_give_what_one_process_gives() -> None:
    ranks = run_ranks(on_a_rank, 2)
    assert all(found["gap"] < 0.1 for found in ranks), "experts in bfloat16 pass the check on two ranks"
    model = CausalLM(test_rspo.moe())
    batch, loss, shift = rspo_step(model, [list(range(16))])
    whole = CausalLM(test_load_balance.moe("Qwen3Moe"))
    balanced, gradient, aux_loss = test_load_balance.step(whole, with_advantages(case_batch()), test_load_balance.COEF)
    for checkpointing in (False, True):
        results = [found["rspo", checkpointing] for found in ranks]
        for result in results:
            for name, found in result["columns"].items():
                expected = batch[name].select(torch.tensor(result["rows"])).values
                torch.testing.assert_close(found, expected, rtol=0, atol=0 if name == "old_router_ids" else 2e-6)
            for name, parameter in model.module.named_parameters():
                torch.testing.assert_close(result["gradients"][name], parameter.grad, rtol=0, atol=2e-6)
        assert sum(result["loss"] for result in results) == pytest.approx(loss, abs=1e-6)
        assert sum(result["shift"] for result in results) == pytest.approx(shift, abs=1e-6) and shift < 0.97
        results = [found["balance", checkpointing] for found in ranks]
        assert sum(result["loss"] for result in results) == pytest.approx(balanced, abs=1e-6)
        assert sum(result["aux_loss"] for result in results) == pytest.approx(aux_loss, abs=1e-6)
        for result in results:
            torch.testing.assert_close(result["gradient"], gradient, rtol=0, atol=2e-6)
