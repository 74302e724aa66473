"""Shards read in place: what is mapped, copied and refused, and that nothing is left open."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch

from hybrid_rl.errors import HandoffError
from hybrid_rl.memory.region import Region
from hybrid_rl.resharding.handoff.base import PeerError
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from tests.unit.resharding.handoff.parts import (
    check_versions,
    empty_engine,
    engine_trace,
    expected,
    globals_of,
    is_equal,
    layout_of,
    plan_of,
    read_bytes_of,
    run_threads,
    shards_of,
)


def in_region(tensors, tag="shards"):
    """The same values in a region."""
    region = Region(tag, capacity_bytes=2**16)
    moved = {name: region.allocate(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        moved[name].copy_(tensor)
    return region, moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_ranks", "num_parts"), [(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)])
def test_every_engine_gets_its_part_of_every_version(num_ranks, num_parts, dtype):
    tensors = globals_of()
    layout = layout_of(tensors, num_ranks)

    def work(rank, gather, leave):
        region, mine = in_region(shards_of(layout, tensors, rank))
        source = IpcSource.connect(layout, IpcExport(layout, rank, mine, [region]), gather)
        trace = engine_trace(tensors, rank % num_parts, num_parts, dtype)
        plan, engine = plan_of(trace, layout, rank), empty_engine(trace)
        found = []
        for version in range(3):
            for tensor in mine.values():
                tensor.mul_(1.5)
            with source.opened(version):
                delivered = source.deliver(plan, engine)
                found.append([t.clone() for t in engine])
        own, others = read_bytes_of(plan)
        assert delivered.num_bytes == (own + others) // 4 * dtype.itemsize == delivered.minimum_bytes
        assert delivered.link_bytes.get("local", 0) == own and delivered.link_bytes.get("host", 0) == others
        # Nothing is staged, so nothing is cut: one launch for each rank that is read.
        assert delivered.num_buckets == len({bucket.source_rank for bucket in plan.buckets}) < len(plan.buckets)
        assert delivered.staging_bytes == 0
        with source.opened(3):
            assert torch.equal(source.full("q"), tensors["q"] * 1.5 * 1.5 * 1.5)
        source.close()
        return found

    check_versions(run_threads(work, num_ranks), num_parts, dtype)


def test_what_lies_in_no_region_is_copied_before_every_handoff():
    tensors = globals_of()
    layout = layout_of(tensors, 1)
    region, mine = in_region({"q": tensors["q"]})
    # Neither is in a region, and one is not contiguous.
    mine |= {name: tensors[name].clone() for name in ("embedding", "k", "norm", "scale")}
    mine["out"] = tensors["out"].T.contiguous().T
    export = IpcExport(layout, 0, mine, [region])
    assert export.copied_bytes == 4 * (11 * 6 + 4 * 6 + 6 + 6 * 8 + 1)
    trace = engine_trace(tensors, 0, 1, torch.float32)
    engine, plan = empty_engine(trace), plan_of(trace, layout, 0)
    # Another participant's view: it has no shards of its own and maps all of this one's.
    reader = IpcSource(layout, [export.exported])
    for version in range(2):
        for tensor in mine.values():
            tensor.add_(1)
        export.refresh()
        with reader.opened(version):
            delivered = reader.deliver(plan, engine)
        assert delivered.link_bytes == {"host": 4 * (11 * 6 + 4 * 6 + 6 + 6 * 8 + 1 + 8 * 6)}
        assert is_equal(engine, expected({n: t + version + 1 for n, t in tensors.items()}, 0, 1, torch.float32))
    reader.close()
    export.close()


def test_a_parameter_that_was_rebound_is_noticed():
    tensors = globals_of()
    layout = layout_of(tensors, 1)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    region, mine = in_region(tensors)
    for name, parameter in parameters.items():
        parameter.data = mine[name]
    export = IpcExport(layout, 0, parameters, [region])
    source = IpcSource(layout, [export.exported], own=export)
    with source.opened(1):
        pass
    parameters["out"].data = parameters["out"].data.clone()
    with pytest.raises(HandoffError, match="rank 0: 'out' has moved since it was exported"), source.opened(2):
        pytest.fail("out has moved")


def test_a_parameter_that_is_missing_or_another_is_refused():
    tensors = globals_of()
    layout = layout_of(tensors, 2)
    shards = shards_of(layout, tensors, 0)
    without = {name: tensor for name, tensor in shards.items() if name != "norm"}
    with pytest.raises(HandoffError, match="rank 0 has no 'norm', of which the layout gives it a part"):
        IpcExport(layout, 0, without)
    with pytest.raises(HandoffError, match=r"rank 0 holds torch.float32 \[4, 5\] of 'q', but the layout says"):
        IpcExport(layout, 0, {**shards, "q": shards["q"][:, :5]})
    with pytest.raises(HandoffError, match=r"rank 0 holds torch.bfloat16 \[4, 6\] of 'q', but the layout says"):
        IpcExport(layout, 0, {**shards, "q": shards["q"].bfloat16()})


def test_memory_of_another_host_is_refused():
    tensors = globals_of()
    layout = layout_of(tensors, 2, hosts=["here", "there"])

    def work(rank, gather, leave):
        source = IpcSource.connect(layout, IpcExport(layout, rank, shards_of(layout, tensors, rank)), gather)
        trace = engine_trace(tensors, rank, 2, torch.float32)
        source.deliver(plan_of(trace, layout, rank), empty_engine(trace))

    for error in run_threads(work, 2):
        assert isinstance(error, HandoffError) and "memory of another host cannot be mapped" in str(error)


def test_a_file_that_is_not_what_was_exported_is_refused():
    tensors = globals_of()
    layout = layout_of(tensors, 1)
    region, mine = in_region(tensors)
    exported = IpcExport(layout, 0, mine, [region]).exported
    fd = region.fd
    region.close()
    with pytest.raises(PeerError, match="the shards of rank 0 cannot be opened at /proc/"):
        IpcSource(layout, [exported]).full("q")
    other = os.dup2(os.memfd_create("other"), fd)
    try:
        with pytest.raises(PeerError, match="is not what rank 0 exported"):
            IpcSource(layout, [exported]).full("q")
    finally:
        os.close(other)


@pytest.mark.parametrize("call", ["open", "mmap"])
def test_a_limit_on_open_files_is_named_and_the_peers_are_told(monkeypatch, call):
    """It is not a peer's fault: the peers still run, and would wait."""
    tensors = globals_of()
    layout = layout_of(tensors, 2)
    said = threading.Event()

    def full(*arguments):
        said.set()
        raise OSError(errno.EMFILE, "Too many open files")

    def work(rank, gather, leave):
        region, mine = in_region(shards_of(layout, tensors, rank))
        source = IpcSource.connect(layout, IpcExport(layout, rank, mine, [region]), gather)
        with source.opened(1):
            if rank == 0:
                monkeypatch.setattr(*{"open": (os, "open"), "mmap": (mmap, "mmap")}[call], full)
                source.full("q")

    first, second = run_threads(work, 2)
    assert said.is_set() and type(first) is HandoffError
    assert "Too many open files" in str(first) and "raise `ulimit -n`" in str(first)
    assert isinstance(second, PeerError) and "participant 0" in str(second) and "ulimit" in str(second)


def test_what_is_mapped_cannot_be_written():
    tensors = globals_of()
    layout = layout_of(tensors, 1)
    region, mine = in_region(tensors)
    reader = IpcSource(layout, [IpcExport(layout, 0, mine, [region]).exported])
    reader.full("q")
    name = os.readlink(f"/proc/self/fd/{region.fd}").split(" ")[0]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[5:6] == [name]]
    # Of other tests a file of the same name may be mapped; this one's number tells it apart.
    number = str(os.fstat(region.fd).st_ino)
    assert sorted(modes for _, modes, _, _, inode, *_ in maps if inode == number) == ["r--s", "rw-s"]


def test_nothing_is_left_open_or_mapped():
    tensors = globals_of()
    layout = layout_of(tensors, 2)

    def count():
        return psutil.Process().num_fds(), Path("/proc/self/maps").read_text().count("/memfd:hybrid_rl")

    def once():
        """Two ranks that map each other, twenty handoffs."""
        exports, regions = [], []
        for rank in range(2):
            region, mine = in_region(shards_of(layout, tensors, rank))
            regions.append(region)
            del mine["norm" if rank == 0 else "q"]
            mine |= {n: t for n, t in shards_of(layout, tensors, rank).items() if n not in mine}
            exports.append(IpcExport(layout, rank, mine, [region]))
        del mine
        sources = [IpcSource(layout, [e.exported for e in exports], own=own) for own in exports]
        trace = engine_trace(tensors, 0, 1, torch.float32)
        engine, plans = empty_engine(trace), [plan_of(trace, layout, rank) for rank in range(2)]
        counts = set()
        for version in range(20):
            for source, plan in zip(sources, plans, strict=True):
                with source.opened(version):
                    source.deliver(plan, engine)
            counts.add(count())
        assert len(counts) == 1, counts
        for thing in (*sources, *sources, *regions):
            thing.close()

    once()
    gc.collect()
    before = count()
    for _ in range(3):
        once()
        assert count() == before  # nothing waits for the garbage collector
