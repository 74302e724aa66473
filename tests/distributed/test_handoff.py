"""Handoffs between real processes: every source brings every element, and a peer that dies or hangs is an error."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hybrid_rl.controller.ranks import object_gather
from hybrid_rl.memory.region import Region
from hybrid_rl.resharding.handoff.base import PeerError
from hybrid_rl.resharding.handoff.disk import DiskSource, write_version
from hybrid_rl.resharding.handoff.distributed import DistributedSource
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from hybrid_rl.resharding.handoff.links import connect
from hybrid_rl.resharding.handoff.verify import Verifier
from hybrid_rl.resharding.layout import SourceLayout
from tests.distributed.ranks import RankError, run_ranks
from tests.support.libraries.torch_names import set_local
from tests.unit.resharding.handoff.parts import (
    empty_engine,
    engine_trace,
    expected,
    globals_of,
    is_equal,
    plan_of,
)

pytestmark = pytest.mark.slow
SECONDS = timedelta(seconds=60)
NUM_VERSIONS = 3


def sharded(num_ranks: int, replicas: int = 1):
    """The global tensors as DTensors in a region, as FSDP2 leaves them; buffers ("scale") plain."""
    shape = (num_ranks,) if replicas == 1 else (replicas, num_ranks // replicas)
    mesh = init_device_mesh("cpu", shape)
    placements = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
    region = Region("shards", capacity_bytes=2**16)
    made = {}
    for name, tensor in globals_of().items():
        if tensor.dim():
            made[name] = distribute_tensor(tensor, mesh, placements)
            local = made[name].to_local()
            if local.numel():
                moved = region.allocate(tuple(local.shape), local.dtype)
                set_local(made[name], moved.copy_(local))
        else:
            made[name] = tensor.clone()
    return made, region


def make_source(kind, rank, num_ranks, tensors, region, gather, folder, version):
    layout = SourceLayout.of(tensors, hosts=["here"] * num_ranks)
    if kind == "ipc":
        source = connect(layout, rank, tensors, regions=[region], gather=gather)
        assert type(source) is IpcSource
        return source
    if kind == "mixed":
        # Pairs of ranks that read each other, and are sent what the others have.
        layout = SourceLayout.of(tensors, hosts=[f"host {number // 2}" for number in range(num_ranks)])
        source = connect(layout, rank, tensors, regions=[region], gather=gather)
        assert type(source) is (DistributedSource if num_ranks > 2 else IpcSource)
        return source
    if kind == "distributed":
        return DistributedSource(layout, rank, tensors, gather=gather, timeout_seconds=60)
    write_version(folder, version, tensors, rank=rank, gather=gather)
    return DiskSource(folder, version, reader=rank, num_readers=num_ranks, gather=gather)


def check_links(kind, plan, delivered, rank, hosts):
    """Check bytes by link against a count from the plan: float32 in place, the engine's dtype in messages."""
    counts, num_sent = {"local": 0, "host": 0, "remote": 0}, 0
    size = delivered.num_bytes // sum(int(bucket.pieces.num_elements.sum()) for bucket in plan.buckets)
    for bucket in plan.buckets:
        peer = bucket.source_rank
        link = "local" if peer == rank else "host" if hosts[peer] == hosts[rank] else "remote"
        is_sent = link != "local" and (kind == "distributed" or (kind == "mixed" and link == "remote"))
        num_sent += is_sent
        counts[link] += int(bucket.pieces.num_elements.sum()) * (size if is_sent else 4)
    if kind != "disk":
        assert delivered.link_bytes == {link: count for link, count in counts.items() if count}
    # Only what is sent is staged.
    if kind in ("ipc", "disk"):
        assert delivered.staging_bytes == 0
    assert delivered.staging_bytes > 0 or not num_sent


def every_source(rank, num_ranks, replicas, folder):
    """Each source through several versions, into engines of both dtypes, split over all ranks and replicated."""
    gather = object_gather(num_ranks, SECONDS)
    checks = 0
    for kind in ("ipc", "distributed", "mixed", "disk"):
        tensors, region = sharded(num_ranks, replicas)
        wanted = globals_of()
        engines = []
        for num_parts in {1, 2} if num_ranks % 2 == 0 else {1}:
            for dtype in (torch.float32, torch.bfloat16):
                trace = engine_trace(wanted, rank % num_parts, num_parts, dtype)
                engines.append((num_parts, dtype, trace, empty_engine(trace)))
        source = None
        version = 0
        for _ in range(NUM_VERSIONS):
            for tensor in tensors.values():
                tensor.mul_(1.5)
            wanted = {name: tensor * 1.5 for name, tensor in wanted.items()}
            for num_parts, dtype, trace, engine in engines:
                version += 1
                if source is None or kind == "disk":
                    path = Path(folder) / f"{kind}-{replicas}"
                    source = make_source(kind, rank, num_ranks, tensors, region, gather, path, version)
                # Plans of all engines in turn: senders have to notice.
                plan = plan_of(trace, source.layout(), rank)
                with source.opened(version):
                    delivered = source.deliver(plan, engine)
                    assert torch.equal(source.full("embedding"), wanted["embedding"])
                    Verifier(trace, source.layout(), gather=gather).verify(source, engine, version=version)
                    checks += 1
                assert is_equal(engine, expected(wanted, rank % num_parts, num_parts, dtype))
                assert delivered.num_bytes == delivered.minimum_bytes == sum(tensor.nbytes for tensor in engine)
                check_links(kind, plan, delivered, rank, source.layout().hosts)
                if kind in ("distributed", "mixed"):
                    assert delivered.staging_bytes <= 4 * num_ranks * 64 + 4 * 16 * 64
        source.close()
    return checks


@pytest.mark.parametrize(("num_ranks", "replicas"), [pytest.param(2, 1, marks=pytest.mark.sweep), (3, 1), (4, 2)])
def test_every_source_brings_every_element_of_every_version(tmp_path, num_ranks, replicas):
    checks = run_ranks(every_source, num_ranks, replicas, str(tmp_path))
    num_engines = 2 if num_ranks % 2 else 4
    assert checks == [4 * NUM_VERSIONS * num_engines] * num_ranks


# ------------------------------------------------------------------------------------------------ a peer that fails


def with_a_bad_peer(rank, num_ranks, kind, what):
    """Rank 1 dies, or stops, after a handoff that worked and before the next one is over; what rank 0 makes of it."""
    gather = object_gather(num_ranks, timedelta(seconds=8))
    tensors, region = sharded(num_ranks)
    layout = SourceLayout.of(tensors, hosts=["here"] * num_ranks)
    if kind == "ipc":
        source = IpcSource.connect(layout, IpcExport(layout, rank, tensors, [region]), gather)
    else:
        source = DistributedSource(layout, rank, tensors, gather=gather, timeout_seconds=4)
    trace = engine_trace(globals_of(), rank, num_ranks, torch.float32)
    plan, engine = plan_of(trace, layout, rank), empty_engine(trace)
    with source.opened(1):
        source.deliver(plan, engine)
    start = time.monotonic()
    with source.opened(2):
        if rank == 1 and what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and what == "raises":
            raise ValueError("rank 1 has no plan")
        if rank == 1 and what == "hangs":
            source.tell(("plan", 2, "", (0, {})))
            time.sleep(40)
        try:
            source.deliver(plan, engine)
        except PeerError:
            assert time.monotonic() - start < 30
            raise


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("ipc", "dies"),
        ("distributed", "hangs"),
        *(pytest.param("distributed", fault, marks=pytest.mark.sweep) for fault in ("dies", "raises")),
    ],
)
def test_a_peer_that_fails_midway_is_an_error_and_nobody_hangs(kind, what):
    with pytest.raises(RankError) as caught:
        run_ranks(with_a_bad_peer, 2, kind, what, deadline_seconds=60)
    text = str(caught.value)
    assert "PeerError" in text.split("rank 1:")[0]
    if what == "raises":
        assert "rank 1 has no plan" in text.split("rank 1:")[0]
