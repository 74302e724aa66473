"""FSDP2 over NCCL with one rank: shards, hooks and collectives on the device, against one plain process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybrid_rl.controller.ranks import join_ranks
from hybrid_rl.engines.base import TAGS, FinishedSample, RolloutRequest, SamplingParams
from hybrid_rl.engines.inplace.engine import InPlaceEngine
from hybrid_rl.memory.cuda_region import CudaRegion
from hybrid_rl.models import CausalLM
from hybrid_rl.training.scoring import batch_logprobs
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM, ShardOptions, device_mesh, shard
from tests.distributed.test_fsdp import EXACT, grpo_backward
from tests.gpu.device import DEVICE, cuda_only
from tests.reference import grpo_case
from tests.support.engines.engine_settings import inplace_settings
from tests.support.inside.engines import graphs_of
from tests.unit.engines.engines import Rig, same_samples
from tests.unit.training.grpo_step import case_batch

ROWS = [list(range(9)), [9], [10, 11, 12, 13, 14, 15]]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of one rank, as a rank of the library makes it."""
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    join_ranks(dist.HashStore(), 0, 1, device, timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def sharded(dtype: torch.dtype, **settings: bool) -> ShardedCausalLM:
    options = ShardOptions(1, 1, dtype, reduce_dtype=torch.promote_types(dtype, torch.float32), **settings)
    module = grpo_case.build_model(dtype).to(DEVICE)
    return ShardedCausalLM(shard(module, device_mesh(options, DEVICE), options))


@pytest.mark.parametrize("sync_every_micro_batch", [False, True])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_one_rank_has_the_gradients_of_a_plain_model(dtype: torch.dtype, sync_every_micro_batch: bool) -> None:
    plain = CausalLM(grpo_case.build_model(dtype).to(DEVICE))
    expected_loss = grpo_backward(plain, [list(range(16))])
    expected = {name: p.grad for name, p in plain.module.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    model = sharded(dtype, sync_every_micro_batch=sync_every_micro_batch)
    model.verify()
    assert grpo_backward(model, ROWS) == pytest.approx(expected_loss, rel=10 * EXACT[dtype], abs=1e-7)
    for name, parameter in model.module.named_parameters():
        gradient = parameter.grad.full_tensor()
        assert gradient.device.type == DEVICE
        # Sums of CUDA kernels run in another order for rows of another length.
        assert float((gradient - expected[name]).abs().max()) <= 10 * EXACT[dtype] * scale, name


def test_one_rank_computes_in_bfloat16_on_fp32_shards() -> None:
    model = sharded(torch.bfloat16)
    grpo_backward(model, ROWS)
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.module.parameters()} == {torch.float32}
    with model.twin.bound():
        assert {p.dtype for p in model.twin.module.parameters()} == {torch.bfloat16}
        twin = batch_logprobs(CausalLM(model.twin.module), case_batch(), ROWS)
    mine = batch_logprobs(model, case_batch(), ROWS)
    torch.testing.assert_close(mine.values, twin.values, rtol=0, atol=0.05)  # bfloat16 has 8 bits


@cuda_only
def test_gathered_weights_keep_their_addresses_and_graphs_are_captured_once() -> None:
    """Three phases, with a backward pass after each that takes and frees memory; the samples are those of an engine
    whose graphs are captured whenever FSDP has gathered elsewhere."""
    device = torch.device(DEVICE, 0)
    kept = generated(lambda num_bytes: CudaRegion("weights", capacity_bytes=num_bytes, device=device))
    moved = generated(None)
    same_samples(kept.samples, moved.samples)
    assert kept.captures[0] > 0 and len(set(kept.captures)) == 1
    assert kept.addresses[0] == kept.addresses[1] == kept.addresses[2]
    assert kept.occupied == [0] * 3


REQUESTS = [
    RolloutRequest(i, tuple(range(2 + i, 6 + 2 * i)), SamplingParams(6 + i % 3, temperature=0.5 * (i % 3), seed=i))
    for i in range(7)
]


@dataclass
class Phases:
    """What three phases of generation gave. occupied: bytes of gathered weights between them, as the driver counts."""

    samples: list[FinishedSample] = field(default_factory=list)
    captures: list[int] = field(default_factory=list)
    addresses: list[list[int]] = field(default_factory=list)
    occupied: list[int] = field(default_factory=list)


def generated(new_region: Callable[[int], CudaRegion] | None) -> Phases:
    """Generate in three phases, the gathered weights in a region or where FSDP puts them."""
    model, seen, regions = sharded(torch.bfloat16), Phases(), []
    if new_region is not None:
        model.twin.keep_addresses(lambda num_bytes: regions.append(new_region(num_bytes)) or regions[0])
    with model.twin.bound():
        engine = InPlaceEngine(model.plain_twin(), inplace_settings(kv_cache_memory_bytes=1 << 24), max_length=48)
    rig = Rig(engine, model.twin.module)
    for version in (1, 2, 3):
        with model.twin.bound():
            seen.samples += rig.ready(version).run(REQUESTS, version)
            seen.addresses.append([p.data_ptr() for p in model.twin.module.parameters()])
            seen.captures.append(graphs_of(engine).num_captures)
            engine.sleep(TAGS)
        seen.occupied += [region.occupied_bytes for region in regions]
        grpo_backward(model, ROWS)
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.grad = None
                parameter.mul_(1.125)  # the same in either run to the bit, as sums of gradients need not be
    engine.close()
    return seen
