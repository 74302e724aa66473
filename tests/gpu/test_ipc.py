"""Shards of one process read by the kernels of another: on one GPU, and over the link if there are two.

Real handles of CUDA between real processes. On a CPU the same code reads memory files.
"""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest
import torch

from hybrid_rl.controller.ranks import object_gather
from hybrid_rl.memory.region import Region
from hybrid_rl.resharding.handoff.distributed import DistributedSource
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from hybrid_rl.resharding.handoff.links import connect
from hybrid_rl.resharding.handoff.verify import Verifier
from hybrid_rl.resharding.rank_plan import make_plan
from tests.distributed.ranks import run_ranks
from tests.gpu.device import DEVICE, cuda_only
from tests.support.libraries.torch_names import let_segments_grow
from tests.unit.resharding.handoff.parts import (
    Row,
    empty_engine,
    engine_trace,
    expected,
    globals_of,
    is_equal,
    layout_of,
    read_bytes_of,
    shards_of,
    trace_of,
)

NUM_HANDOFFS = 50
NUM_VERSIONS = 3  # of different weights
SECONDS = timedelta(seconds=120)
CONTEXT_BYTES = 200 << 20  # less than any CUDA context, more than kernels that are loaded late
NUM_ROWS, NUM_COLUMNS = 4096, 4096  # 64 MiB in float32: several allocations of the caching allocator


def device_of(rank: int, one_gpu: bool) -> torch.device:
    """The rank's own device, made the current one."""
    device = torch.device(DEVICE, 0 if one_gpu else rank) if DEVICE == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def used_bytes(device: torch.device) -> int:
    """Of the device, by all processes."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def placed(tensors, device):
    """The tensors where a rank has its shards: on its device, or in a region; and what keeps them there."""
    if device.type == "cuda":
        return {name: tensor.to(device) for name, tensor in tensors.items()}, None
    region = Region("shards", capacity_bytes=sum(t.nbytes + 4096 for t in tensors.values()) + 4096)
    made = {name: region.allocate(tuple(t.shape), t.dtype).copy_(t) for name, t in tensors.items()}
    return made, region


def on(device, tensors):
    return [tensor.to(device) for tensor in tensors]


def reads_in_place(rank, num_ranks, one_gpu, num_parts):
    """Fifty handoffs of every rank's shards to an engine on every rank, fused, cut, cast and verified."""
    device = device_of(rank, one_gpu)
    gather = object_gather(num_ranks, SECONDS)
    tensors = globals_of()
    layout = layout_of(tensors, num_ranks)
    shards, region = placed(shards_of(layout, tensors, rank), device)
    trace = engine_trace(tensors, rank % num_parts, num_parts, torch.bfloat16)
    engine, plan = on(device, empty_engine(trace)), make_plan(trace, layout, rank, bucket_bytes=64)
    source = connect(layout, rank, shards, regions=[region] if region else (), device=device, gather=gather)
    assert type(source) is IpcSource
    verifier = Verifier(trace, layout, gather=gather)
    allocated = []
    for version in range(1, NUM_HANDOFFS + 1):
        if version <= NUM_VERSIONS:
            tensors = {name: tensor * 1.5 for name, tensor in tensors.items()}
            for tensor in shards.values():
                tensor.mul_(1.5)
        for tensor in engine:
            tensor.fill_(77)
        with source.opened(version):
            delivered = source.deliver(plan, engine)
            if version % 10 == 1:
                verifier.verify(source, engine, version=version)
        assert is_equal(on("cpu", engine), expected(tensors, rank % num_parts, num_parts, torch.bfloat16))
        allocated.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    assert delivered.staging_bytes == 0 and delivered.num_bytes == delivered.minimum_bytes
    far = "host" if device.type == "cpu" else "local" if one_gpu else "peer"
    own, others = read_bytes_of(plan)
    wanted = {"local": own}
    wanted[far] = wanted.get(far, 0) + others
    assert delivered.link_bytes == wanted
    assert len(set(allocated[10:])) == 1, allocated
    gather(None)
    source.close()
    gather(None)
    if device.type == "cuda":
        # Memory that was exported is free again as soon as its owner lets go of it.
        before = torch.cuda.memory_allocated()
        freed = sum(-(-tensor.nbytes // 512) * 512 for tensor in shards.values())
        del source, verifier, tensor
        shards.clear()
        gc.collect()
        assert before - torch.cuda.memory_allocated() >= freed
    return len(allocated)


def reads_much(rank, num_ranks, one_gpu):
    """Many bytes, a destination of other strides, and no context of a rank on another one's GPU."""
    device = device_of(rank, one_gpu)
    gather = object_gather(num_ranks, SECONDS)
    whole = torch.arange(NUM_ROWS * NUM_COLUMNS, dtype=torch.float32).remainder_(8191).view(NUM_ROWS, NUM_COLUMNS)
    tensors = {"weight": whole}
    layout = layout_of(tensors, num_ranks)
    shards, region = placed(shards_of(layout, tensors, rank), device)
    half = NUM_COLUMNS // 2
    rows = [
        Row("weight", (0, 0), (NUM_ROWS, half), "right", (0, 0)),
        Row("weight", (0, half), (NUM_ROWS, NUM_COLUMNS), "left", (0, 0)),
    ]
    trace = trace_of(tensors, {"left": (NUM_ROWS, half), "right": (NUM_ROWS, half)}, rows, torch.bfloat16)
    engine, plan = on(device, empty_engine(trace)), make_plan(trace, layout, rank)
    torch.ones(1, device=device).mul_(2)
    gather(None)
    before = used_bytes(device)
    source = connect(layout, rank, shards, regions=[region] if region else (), device=device, gather=gather)
    for version in range(1, 4):
        with source.opened(version):
            source.deliver(plan, engine)
    gather(None)
    grown = used_bytes(device) - before
    gather(None)
    left, right = (tensor.float() for tensor in on("cpu", engine))
    assert torch.equal(right, whole[:, :half].bfloat16().float())
    assert torch.equal(left, whole[:, half:].bfloat16().float())
    assert source.full("weight").cpu().equal(whole)
    gather(None)
    source.close()
    assert grown < CONTEXT_BYTES, f"{grown} bytes more are in use on {device}"
    return grown


def shares_expandable_segments(rank, num_ranks):
    """What PyTorch's own account of its memory says of segments that grow."""
    device = device_of(rank, True)
    let_segments_grow()
    gather = object_gather(num_ranks, SECONDS)
    tensors = globals_of()
    layout = layout_of(tensors, num_ranks)
    shards, _ = placed(shards_of(layout, tensors, rank), device)
    source = connect(layout, rank, shards, device=device, gather=gather)
    assert type(source) is DistributedSource
    obstacle = IpcExport(layout, rank, shards).exported.obstacle
    source.close()
    return obstacle


def gpus(number: int):
    """Skips if there are fewer GPUs."""
    here = torch.cuda.device_count() if DEVICE == "cuda" else 0
    reason = f"needs {number} GPUs that can read each other; here are {here}"
    return pytest.mark.skipif(DEVICE == "cuda" and not _all_access(number), reason=reason)


def _all_access(number: int) -> bool:
    if torch.cuda.device_count() < number:
        return False
    pairs = [(a, b) for a in range(number) for b in range(number) if a != b]
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_two_processes_on_one_gpu_read_each_other(num_parts):
    assert run_ranks(reads_in_place, 2, True, num_parts) == [NUM_HANDOFFS] * 2


def test_two_processes_on_one_gpu_take_no_more_memory_than_their_own():
    run_ranks(reads_much, 2, True)


@gpus(2)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_two_gpus_read_each_other_over_the_link(num_parts):
    assert run_ranks(reads_in_place, 2, False, num_parts) == [NUM_HANDOFFS] * 2


@gpus(2)
def test_no_rank_has_a_context_on_the_gpu_of_another():
    run_ranks(reads_much, 2, False)


@gpus(4)
def test_four_gpus_read_each_other_over_the_link():
    assert run_ranks(reads_in_place, 4, False, 2) == [NUM_HANDOFFS] * 4


@cuda_only
def test_memory_in_expandable_segments_is_known_for_what_it_is():
    for obstacle in run_ranks(shares_expandable_segments, 2):
        assert "take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF" in obstacle
