"""The gradient of every policy loss, and of its company, on two real ranks against one plain process."""

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.controller import RankContext, RankMesh
from hybrid_rl.models import CausalLM
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, device_mesh, shard
from hybrid_rl.training.spec import Counts, LossSpec
from tests.distributed.ranks import run_ranks
from tests.reference import grpo_case
from tests.unit.training.objective_steps import STEPS, backward, prepared_batch, step_batch, step_config

pytestmark = pytest.mark.slow

# Samples of each rank's micro-batches: unequal shares, and one of weight zero.
SPLIT = [[[0, 5, 2], [11, 3, 4, 1, 6, 7, 8], [9, 10, 12]], [[13, 14], [15], []]]


def gather(value: object) -> list[object]:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def on_ranks(rank: int, num_ranks: int) -> dict[str, tuple[float, dict[str, torch.Tensor], torch.Tensor]]:
    """By step: this rank's part of the loss, gradients put together from the shards, what is learned beside them."""
    context = RankContext(rank=rank, mesh=RankMesh(dp_shard=num_ranks), gather=gather)
    options = ShardOptions(1, num_ranks, torch.float32)
    module = grpo_case.build_model(torch.float32)
    model = ShardedCausalLM(shard(module, device_mesh(options, "cpu"), options))
    results = {}
    for name in STEPS:
        config = step_config(name)
        whole = step_batch(config)
        mine = whole.select([row for rows in SPLIT[rank] for row in rows])
        counts = Counts.of(whole, LossSpec.of(config))
        # Micro-batches of this rank's own batch, whose samples are one after the other.
        starts = [sum(map(len, SPLIT[rank][:index])) for index in range(len(SPLIT[rank]))]
        micro_batches = [[start + i for i in range(len(rows))] for start, rows in zip(starts, SPLIT[rank], strict=True)]
        mine = prepared_batch(mine, config, [rows for rows in micro_batches if rows], context)
        loss, learned = backward(model, mine, config, micro_batches, counts)
        gradients = {key: p.grad.full_tensor() for key, p in module.named_parameters()}
        results[name] = loss, gradients, torch.zeros(1) if learned is None else learned
        model.discard_gradients()
    return results


def test_gradients_are_those_of_one_process() -> None:
    ranks = run_ranks(on_ranks, 2)
    for name in STEPS:
        config = step_config(name)
        everything = [list(range(16))]
        batch = prepared_batch(step_batch(config), config, everything, RankContext())
        model = CausalLM(grpo_case.build_model(torch.float32))
        loss, learned = backward(model, batch, config, everything, Counts.of(batch, LossSpec.of(config)))
        assert sum(result[name][0] for result in ranks) == pytest.approx(loss, rel=1e-5, abs=1e-6), name
        if learned is not None:
            torch.testing.assert_close(sum(result[name][2] for result in ranks), learned, rtol=0, atol=1e-6)
        expected = {key: p.grad for key, p in model.module.named_parameters()}
        for result in ranks:
            for key, gradient in expected.items():
                torch.testing.assert_close(result[name][1][key], gradient, rtol=0, atol=1e-6, msg=f"{name}: {key}")


def test_every_step_is_another_one() -> None:
    """A table of settings that do nothing would prove nothing. lambda-GRPO begins as DAPO: its exponent is 0."""
    found = {}
    for name in STEPS:
        config = step_config(name)
        batch = prepared_batch(step_batch(config), config, [list(range(16))], RankContext())
        model = CausalLM(grpo_case.build_model(torch.float32))
        backward(model, batch, config, [list(range(16))], Counts.of(batch, LossSpec.of(config)))
        found[name] = grpo_case.flatten_gradient(model.module)
    same = [(a, b) for a in found for b in found if a < b and torch.equal(found[a], found[b])]
    assert same == [("clip", "lambda_grpo")], str(same)
