"""An update on two real ranks, of which one has only groups that teach nothing, against one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.models import CausalLM
from hybrid_rl.training.actor import Actor
from hybrid_rl.training.batch_plan import PlanSpec
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, device_mesh, shard
from tests.distributed.ranks import run_ranks
from tests.reference import grpo_case
from tests.unit.training.grpo_step import case_config, rolled_batch

pytestmark = pytest.mark.slow

# Groups of four: alike, mixed; alike, alike. A micro-batch takes one group, so that ranks have unequal numbers too.
REWARDS = (1.0,) * 4 + (0.0, 1.0, 1.0, 0.3) + (0.0,) * 4 + (0.5,) * 4
KEYS: dict[str, Any] = {"learning_rate": 1e-3, "tokens_per_micro_batch": 45, "prompts_per_step": 4}


def gather(value: object) -> list[object]:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_ranks(rank: int, num_ranks: int) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """The weights put together from the shards, and whether each forward pass took gradients."""
    context = RankContext(rank=rank, mesh=RankMesh(dp_shard=num_ranks), gather=gather)
    options = ShardOptions(1, num_ranks, torch.float32)
    module = grpo_case.build_model(torch.float32)
    model = ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options))
    config, passes = case_config(**KEYS), list[bool]()
    actor = Actor(model, config, context, num_optimizer_steps=4)
    module.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    mine = rolled_batch(REWARDS).select([*range(8 * rank, 8 * rank + 8)])
    actor.update(mine, PlanSpec.of(config).plan(mine, 0, context, torch.device("cpu")), 0)
    return {name: parameter.full_tensor() for name, parameter in module.named_parameters()}, passes


def test_ranks_that_teach_nothing_take_part() -> None:
    (first, its_passes), (second, other_passes) = run_ranks(on_ranks, 2)
    assert its_passes == other_passes and its_passes[0] is False and its_passes[-1] is True
    config, context = case_config(**KEYS), RankContext()
    actor = Actor(CausalLM(grpo_case.build_model(torch.float32)), config, context, num_optimizer_steps=4)
    actor.update(rolled_batch(REWARDS), [[[*range(16)]]], 0)
    for name, parameter in actor.model.module.named_parameters():
        torch.testing.assert_close(first[name], parameter.detach(), rtol=0, atol=1e-6, msg=name)
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=0, msg=name)
