"""Gradients of several micro-batches: what a rank holds of them between two, and that when they are reduced does not
change them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.compat import torch_fsdp as fsdp2
from hybrid_rl.config import FSDPConfig, TrainerConfig, resolve
from hybrid_rl.controller import RankMesh
from hybrid_rl.training.sharding.build import shard_options
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, accumulating
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import sharded
from tests.distributed.test_fsdp import THREE, UNEVEN, grpo_backward, plain_gradients
from tests.reference import grpo_case
from tests.support.libraries.torch_names import FakeStore

pytestmark = pytest.mark.slow

NUM_RANKS = 8


def model_of(dtype: torch.dtype, **settings: Any) -> ShardedCausalLM:
    return sharded(grpo_case.build_model(dtype), dtype, "sdpa", **settings)


def held_bytes(model: ShardedCausalLM) -> dict[str, int]:
    """Bytes of gradients, of whole parameters and of shards."""
    whole = sharded = 0
    for parameter in fsdp2.parameters(model.module):
        gathered = getattr(parameter, "_unsharded_param", None)
        for gradient in (parameter.unsharded_accumulated_grad, None if gathered is None else gathered.grad):
            whole += 0 if gradient is None else gradient.nbytes
    for parameter in model.module.parameters():
        gradient: Any = parameter.grad
        sharded += 0 if gradient is None else gradient.to_local().nbytes
    return {"whole": whole, "sharded": sharded}


def bytes_on_a_rank(rank: int, num_ranks: int, world_size: int) -> dict[str, Any]:
    """One of `world_size` ranks, the others being pretended: what they send is garbage, of the right size."""
    if world_size > 1:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    seen: dict[str, Any] = {}
    for sync in (False, True):
        model = model_of(torch.bfloat16, sync_every_micro_batch=sync)
        tokens = torch.arange(12)
        seen[sync] = []
        for index in range(3):
            with accumulating(model, is_last=index == 2):
                logprobs, _ = model.packed_logprobs(tokens, [7, 5], torch.tensor([2, 4, 9]), 1.0)
                logprobs.sum().backward()
            seen[sync].append(held_bytes(model))
        shards: list[Any] = list(model.module.parameters())
        seen["shard"] = sum(p.to_local().numel() for p in shards) * 4
        seen["full"] = sum(p.numel() for p in shards) * 4
    return seen


@pytest.mark.parametrize("world_size", [1, NUM_RANKS])
def test_bytes_of_gradients_between_micro_batches(world_size: int) -> None:
    """In float32 for a model in bfloat16: whole ones until the last micro-batch, or shards from the first on."""
    (seen,) = run_ranks(bytes_on_a_rank, 1, world_size)
    full, part = seen["full"], seen["shard"]
    assert full == world_size * part > 0
    whole, sharded = {"whole": full, "sharded": 0}, {"whole": 0, "sharded": part}
    assert seen[False] == [whole, whole, sharded]
    assert seen[True] == [sharded, sharded, sharded]


def both_ways_on_ranks(rank: int, num_ranks: int) -> dict[str, dict[str, dict[bool, dict[str, torch.Tensor]]]]:
    """By dtype and by layout: gradients reduced once, and after every micro-batch."""
    split = [list(range(16)), [], []] if num_ranks == 1 else (UNEVEN if num_ranks == 2 else THREE)[rank]
    seen: dict[str, Any] = {}
    for dtype, reduce_dtype in SUMS:
        for replicas in (1, num_ranks) if num_ranks > 1 else (1,):
            both = {}
            for sync in (False, True):
                axes = {"dp_replicate": replicas, "dp_shard": num_ranks // replicas}
                model = model_of(dtype, reduce_dtype=reduce_dtype, sync_every_micro_batch=sync, **axes)
                grpo_backward(model, split)
                both[sync] = {name: p.grad.full_tensor() for name, p in model.module.named_parameters()}
            seen[f"{dtype}, {reduce_dtype}, {replicas}"] = both
    return seen


# What the two ways may differ by, of the largest gradient: they add the same numbers up in another order.
SUMS = {
    (torch.float64, torch.float64): 1e-14,
    (torch.float32, torch.float32): 1e-6,
    (torch.bfloat16, torch.float32): 1e-6,  # each micro-batch's gradient is in bfloat16, and the same; sums are not
    (torch.bfloat16, torch.bfloat16): 3 * 2.0**-8,  # whole ones are added up in bfloat16, shards in float32
}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_do_not_depend_on_when_they_are_reduced(num_ranks: int) -> None:
    _, expected = plain_gradients(torch.float64)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for seen in run_ranks(both_ways_on_ranks, num_ranks):
        assert len(seen) == len(SUMS) * num_ranks
        for (label, both), tolerance in zip(
            seen.items(), [t for t in SUMS.values() for _ in range(num_ranks)], strict=True
        ):
            for name, once in both[False].items():
                gap = float((both[True][name] - once).abs().max()) / scale
                assert gap <= tolerance, f"{label}, {name}: {gap:.1e}"
                error = float((both[True][name] - expected[name]).abs().max()) / scale
                assert error <= (0.05 if "bfloat16" in label else 1e-6), f"{label}, {name}: {error:.1e}"


@pytest.mark.parametrize(
    ("given", "device_type", "expected"),
    [(None, "cuda", True), (None, "cpu", False), (False, "cuda", False), (True, "cpu", True)],
)
def test_who_reduces_after_every_micro_batch(given: bool | None, device_type: str, expected: bool) -> None:
    config = resolve(replace(TrainerConfig(), fsdp=FSDPConfig(sync_every_micro_batch=given)))
    mesh = RankMesh(dp_shard=2)
    assert shard_options(config, mesh, device_type).sync_every_micro_batch is expected
