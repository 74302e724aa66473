"""Shards in regions of GPU memory, read in place by other processes: over a stand-in of the driver."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from hybrid_rl.errors import HandoffError
from hybrid_rl.memory.cuda_region import CudaRegion, OpenedRegion
from hybrid_rl.resharding.handoff import region_memory
from hybrid_rl.resharding.handoff.base import PeerError
from hybrid_rl.resharding.handoff.ipc import Exported, IpcExport, IpcSource
from hybrid_rl.resharding.handoff.region_memory import RegionLender, open_region
from tests.support.cuda.cuda_stand_in import StandIn, stand_in
from tests.unit.resharding.handoff.parts import (
    empty_engine,
    engine_trace,
    expected,
    globals_of,
    is_equal,
    layout_of,
    plan_of,
    run_threads,
    shards_of,
)

CPU = torch.device("cpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    gc.collect()
    made = stand_in()
    monkeypatch.setattr(region_memory, "OpenedRegion", partial(OpenedRegion, driver=made.driver))
    yield made
    gc.collect()
    assert made.ledger().is_empty, made.ledger()


def in_region(tensors: dict[str, torch.Tensor], driver: StandIn, **settings: Any) -> tuple[CudaRegion, dict[str, Any]]:
    """The same values in a region of many pieces."""
    settings = {"chunk_bytes": 4096, "shareable": True, **settings}
    region = CudaRegion("shards", capacity_bytes=2**20, device="cpu", driver=driver.driver, **settings)
    region.allocate((1000, 1000 // 4), torch.float32)
    return region, {name: region.allocate(tuple(t.shape), t.dtype).copy_(t) for name, t in tensors.items()}


def test_every_engine_gets_its_part_of_every_version(driver: StandIn) -> None:
    tensors = globals_of()
    layout = layout_of(tensors, 2)

    def work(rank: int, gather: Any, leave: Any) -> list[list[torch.Tensor]]:
        region, mine = in_region(shards_of(layout, tensors, rank), driver)
        export = IpcExport(layout, rank, mine, [region])
        assert export.copied_bytes == 0 and len(export.exported.regions) == 1 and not export.exported.obstacle
        source = IpcSource.connect(layout, export, gather)
        trace = engine_trace(tensors, rank, 2, torch.float32)
        plan, engine = plan_of(trace, layout, rank), empty_engine(trace)
        found = []
        for version in range(3):
            for tensor in mine.values():
                tensor.mul_(1.5)
            with source.opened(version):
                assert source.deliver(plan, engine).staging_bytes == 0
                found.append([t.clone() for t in engine])
        source.close()
        return found

    for rank, versions in enumerate(run_threads(work, 2)):
        assert not isinstance(versions, Exception), versions
        scaled = dict(tensors)
        for engine in versions:
            scaled = {name: tensor * 1.5 for name, tensor in scaled.items()}
            assert is_equal(engine, expected(scaled, rank, 2, torch.float32))


def read_elsewhere(exported: Exported, driver: StandIn, answers: Any) -> None:
    """In another process."""
    region_memory.OpenedRegion = partial(OpenedRegion, driver=driver.driver)  # type: ignore[misc,assignment]
    tensors = globals_of()
    source = IpcSource(layout_of(tensors, 1), [exported])
    answers.send((source.obstacle(0), source.full("q").tolist()))
    answers.recv()
    answers.send(source.full("q").tolist())


def test_another_process_reads_what_the_owner_writes(driver: StandIn) -> None:
    tensors = globals_of()
    layout = layout_of(tensors, 1)
    region, mine = in_region(tensors, driver)
    export = IpcExport(layout, 0, mine, [region])
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=read_elsewhere, args=(export.exported, driver, theirs))
    process.start()
    try:
        assert ours.poll(30) and ours.recv() == ("", tensors["q"].tolist())
        mine["q"].mul_(2)
        ours.send("again")
        assert ours.poll(30) and ours.recv() == (2 * tensors["q"]).tolist()
    finally:
        process.join(30)
    export.close()


def test_more_pieces_than_a_message_holds_arrive_in_order(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_memory, "MOST_FDS", 3)
    region, mine = in_region({"a": torch.arange(5000.0)}, driver, chunk_bytes=2**17)
    num_files = len(os.listdir("/proc/self/fd"))
    lender = RegionLender([region])
    opened = open_region(lender.lent[0], 0, CPU)
    assert torch.equal(opened.tensor(region.offset_of(mine["a"]), (5000,), torch.float32), mine["a"])
    del opened
    gc.collect()
    lender.close()  # it waits for its thread, which closes its descriptors after the answer has come
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_a_region_that_slept_must_be_exported_again(driver: StandIn) -> None:
    tensors = globals_of()
    layout = layout_of(tensors, 1)
    region, mine = in_region(tensors, driver)
    export = IpcExport(layout, 0, mine, [region])
    region.release()
    region.restore()
    with pytest.raises(HandoffError, match="rank 0: region 'shards' has slept since it was exported"):
        export.refresh()
    late = IpcSource(layout, [export.exported])
    with pytest.raises(HandoffError, match="region 'shards' of rank 0: it has slept since it was exported"):
        late.parts(0)
    export.close()
    again = IpcExport(layout, 0, mine, [region])
    again.refresh()
    assert not IpcSource(layout, [again.exported]).obstacle(0)
    again.close()


def test_what_cannot_be_shared_is_the_obstacle(driver: StandIn) -> None:
    tensors = globals_of()
    region, mine = in_region(tensors, driver, shareable=False)
    export = IpcExport(layout_of(tensors, 1), 0, mine, [region])
    assert "'shards' cannot be shared: its memory was not made to be shared" in export.exported.obstacle
    export.close()


def test_an_owner_that_is_gone_is_a_peer_error_and_a_driver_that_refuses_an_obstacle(driver: StandIn) -> None:
    tensors = globals_of()
    layout = layout_of(tensors, 1)
    region, mine = in_region(tensors, driver)
    export = IpcExport(layout, 0, mine, [region])
    driver.fail("cuMemImportFromShareableHandle", 3, 801)
    refused = IpcSource(layout, [export.exported])
    assert "cannot be opened: cuMemImportFromShareableHandle" in refused.obstacle(0)
    assert not refused.obstacle(0)  # the next time it works
    export.close()
    with pytest.raises(PeerError, match="region 'shards' of rank 0 cannot be had .ConnectionRefusedError"):
        IpcSource(layout, [export.exported]).parts(0)


@pytest.mark.parametrize("sent", [b"nonsense", b"[]", json.dumps([7, 0]).encode()])
def test_who_talks_nonsense_gets_no_answer_and_the_next_does(driver: StandIn, sent: bytes) -> None:
    region, mine = in_region({"a": torch.ones(3)}, driver)
    lender = RegionLender([region])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{lender.lent[0].address}")
        connection.send(sent)
        connection.settimeout(10)
        assert connection.recv(100) == b""
    opened = open_region(lender.lent[0], 0, CPU)
    assert opened.tensor(region.offset_of(mine["a"]) or 0, (3,), torch.float32).tolist() == [1.0] * 3
    lender.close()
    lender.close()
