"""The links between ranks, and reads of a GPU from its peers: the device of each kernel, and the bytes staged."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff import gpu_memory, ipc, links
from hybrid_rl.resharding.handoff.base import PeerError, copy_shares, local_parts
from hybrid_rl.resharding.handoff.distributed import DistributedSource
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from hybrid_rl.resharding.handoff.links import connect
from hybrid_rl.resharding.rank_plan import make_plan
from tests.support.libraries.torch_names import releases_exported_memory
from tests.unit.resharding.handoff.gpus import Node, on_gpu, plain
from tests.unit.resharding.handoff.parts import (
    empty_engine,
    engine_trace,
    expected,
    globals_of,
    is_equal,
    layout_of,
    read_bytes_of,
    run_threads,
    shards_of,
)

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
NUM_HANDOFFS = 50


class Sent(DistributedSource):
    """Stands for messages between threads: what would be sent is read from the other thread's shards instead."""

    shards: dict[int, list] = {}
    plans: list = []

    def __init__(self, layout, rank, tensors, **options):
        super().__init__(layout, rank, tensors, **options)
        Sent.shards[rank] = [plain(t) for t in local_parts(layout, rank, tensors)]

    def prepare(self, version):
        self._reader.prepare(version)

    def _exchange(self, plan, destinations, copying):
        copied = copying()
        sent = [share for share in plan.shares if share.source_rank in self._sent]
        Sent.plans.append((self._rank, sorted(share.source_rank for share in sent)))
        copy_shares(sent, Sent.shards.__getitem__, [plain(tensor) for tensor in destinations], lambda rank: "host")
        return copied, 0


@pytest.fixture
def sent(monkeypatch):
    monkeypatch.setattr(links, "DistributedSource", Sent)
    monkeypatch.setattr(Sent, "shards", {})
    monkeypatch.setattr(Sent, "plans", [])
    return Sent


def handed_over(node, *, num_parts=1, num_handoffs=1, hosts=None):
    """Every rank's shards on its own GPU, to an engine there; the engines, sources and reports by rank."""
    tensors = globals_of()
    num_ranks = len(node.own)
    layout = layout_of(tensors, num_ranks, hosts=hosts)

    def work(rank, gather, leave):
        device = node.enter(rank)
        shards = {n: on_gpu(t, device.index) for n, t in shards_of(layout, tensors, rank).items()}
        source = connect(layout, rank, shards, device=device, gather=gather)
        trace = engine_trace(tensors, rank % num_parts, num_parts, torch.bfloat16)
        plan = make_plan(trace, layout, rank, bucket_bytes=64)
        engine = [on_gpu(t, device.index) for t in empty_engine(trace)]
        for version in range(1, num_handoffs + 1):
            node.note("write", version)
            for tensor in shards.values() if version <= 3 else ():
                tensor.mul_(1.5)
            with source.opened(version):
                delivered = source.deliver(plan, engine)
        gather(None)
        source.close()
        return engine, source, delivered, plan

    results = run_threads(work, num_ranks)
    for result in results:
        assert not isinstance(result, Exception), result
    scaled = dict(tensors)
    for _ in range(min(3, num_handoffs)):
        scaled = {name: tensor * 1.5 for name, tensor in scaled.items()}
    for rank, (engine, *_) in enumerate(results):
        assert is_equal([plain(t) for t in engine], expected(scaled, rank % num_parts, num_parts, torch.bfloat16))
    return results


def all_visible(num_ranks):
    return [GPUS[:num_ranks]] * num_ranks


@pytest.mark.parametrize(("num_ranks", "num_parts"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_gpu_reads_its_peers_in_place_and_touches_no_other_device(monkeypatch, sent, num_ranks, num_parts):
    node = Node(monkeypatch, all_visible(num_ranks), GPUS[:num_ranks])
    results = handed_over(node, num_parts=num_parts, num_handoffs=3)
    for rank, (_, source, delivered, plan) in enumerate(results):
        assert type(source) is IpcSource and not sent.plans
        assert delivered.staging_bytes == 0 and node.count("stage") == 0
        # fp32 shards travel as they are and become bf16 in the kernel.
        assert delivered.link_bytes == dict(zip(("local", "peer"), read_bytes_of(plan), strict=True))
        assert delivered.num_bytes == delivered.minimum_bytes == sum(read_bytes_of(plan)) // 2
        ranks_read = {bucket.source_rank for bucket in plan.buckets}
        assert delivered.num_buckets == len(ranks_read)
        launches = [of for who, what, of in node.events if (who, what) == (rank, "launch")]
        assert launches == [rank] * 3 * len(ranks_read)


def test_processes_that_number_the_gpus_differently_find_the_right_one(monkeypatch, sent):
    numbering = [("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")]
    node = Node(monkeypatch, numbering, GPUS[:2])
    assert node.device(0) == node.device(1) == torch.device("cuda", 0)
    handed_over(node)
    assert {(who, of) for who, what, of in node.events if what == "open"} == {(0, "GPU-b"), (1, "GPU-a")}


def test_shards_on_the_gpu_of_another_process_are_local(monkeypatch, sent):
    node = Node(monkeypatch, [GPUS[:1]] * 2, ["GPU-a", "GPU-a"])
    for _, source, delivered, plan in handed_over(node):
        assert type(source) is IpcSource
        assert delivered.link_bytes == {"local": sum(read_bytes_of(plan))}


def test_the_arguments_that_are_changed_are_those_of_pytorch():
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[gpu_memory._DEVICE] == "storage_device"
    assert names[gpu_memory._COUNTER] == "ref_counter_handle"
    assert names[gpu_memory._COUNTER_OFFSET] == "ref_counter_offset"
    assert names[gpu_memory._WAITS_FOR_EVENT] == "event_sync_required"
    assert releases_exported_memory()


def test_handles_are_made_and_opened_once_for_many_handoffs_and_given_back(monkeypatch, sent):
    """Rank 2 is on another host: no rank opens its handles, and PyTorch would keep its memory for ever."""
    node = Node(monkeypatch, all_visible(3), GPUS[:3])
    tensors = globals_of()
    handed_over(node, hosts=["here", "here", "there"], num_handoffs=NUM_HANDOFFS)
    held = [len(shards_of(layout_of(tensors, 3), tensors, rank)) for rank in range(3)]
    assert node.count("export") == sum(held)
    assert node.count("open") == held[0] + held[1]
    assert node.count("launch") == NUM_HANDOFFS * (2 + 2 + 1)
    assert set(node.counters.values()) == {0}


def test_nobody_reads_before_all_have_written_and_nobody_writes_before_all_have_read(monkeypatch, sent):
    num_ranks, num_handoffs = 3, 4
    node = Node(monkeypatch, all_visible(num_ranks), GPUS[:num_ranks])
    handed_over(node, num_handoffs=num_handoffs)
    events = [(who, what) for who, what, _ in node.events if what in ("write", "synchronise", "launch")]
    one = ["write", "synchronise", *["launch"] * num_ranks, "synchronise"]
    at = {}
    for rank in range(num_ranks):
        own = [i for i, (who, _) in enumerate(events) if who == rank]
        assert [events[i][1] for i in own] == one * num_handoffs
        at[rank] = [own[i : i + len(one)] for i in range(0, len(own), len(one))]
    for version in range(num_handoffs):
        written = max(at[rank][version][1] for rank in at)  # the device of each rank has done what it was given
        read = max(at[rank][version][-1] for rank in at)
        assert all(written < at[rank][version][2] for rank in at)
        assert version + 1 == num_handoffs or all(read < at[rank][version + 1][0] for rank in at)


def test_shards_in_host_memory_reach_a_gpu_bucket_by_bucket(monkeypatch):
    """No kernel of a GPU reads them in place."""
    node = Node(monkeypatch, all_visible(2), GPUS[:2])
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, d, *more: on_gpu(t, d.index) if "cuda" in str(d) else to(t, d, *more)
    )
    tensors = globals_of()
    layout = layout_of(tensors, 2)

    def work(rank, gather, leave):
        device = node.enter(rank)
        source = connect(layout, rank, shards_of(layout, tensors, rank), device=device, gather=gather)
        trace = engine_trace(tensors, 0, 1, torch.bfloat16)
        plan, engine = make_plan(trace, layout, rank, bucket_bytes=64), empty_engine(trace)
        with source.opened(1):
            delivered = source.deliver(plan, [on_gpu(tensor, device.index) for tensor in engine])
        assert is_equal(engine, expected(tensors, 0, 1, torch.bfloat16))
        return delivered, plan

    found = run_threads(work, 2)
    for delivered, plan in found:
        # Every bucket once on either side, each of its pieces filled up to 16 bytes.
        assert 0 < delivered.staging_bytes <= 2 * max(64 + 16 * len(bucket.pieces) for bucket in plan.buckets)
        assert delivered.num_buckets == len(plan.buckets) > 2
        assert delivered.link_bytes == dict(zip(("local", "host"), read_bytes_of(plan), strict=True))
    assert node.count("launch") == 0
    assert node.count("stage") == sum(len(plan.buckets) for _, plan in found)  # unpacked on the GPU


PAIR = frozenset(("GPU-a", "GPU-d"))
CASES = {
    # what is in the way, who is then sent whose weights, what is said
    "access": ({"no_access": [PAIR]}, {0: [3], 3: [0]}, "cuda:0 has no access to the memory of GPU GPU-d"),
    "expandable": ({"expandable": [1]}, {0: [1], 2: [1], 3: [1]}, "take expandable_segments:True out of PYTORCH_CUDA"),
    "hidden": ({}, {0: [3], 3: [0]}, "GPU GPU-d is not visible to this process; leave CUDA_VISIBLE_DEVICES alone"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_read_is_sent_and_the_rest_still_read(monkeypatch, sent, caplog, name):
    settings, wanted, said = CASES[name]
    numbering = all_visible(4)
    if name == "hidden":
        numbering = [GPUS[:3], GPUS, GPUS, GPUS[1:]]
    node = Node(monkeypatch, numbering, GPUS, **settings)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        results = handed_over(node)
    assert said in caplog.text
    # All of them take part in the messages, with an empty plan if nothing is sent to them.
    assert dict(sent.plans) == {rank: wanted.get(rank, []) for rank in range(4)}
    for rank, (_, source, delivered, plan) in enumerate(results):
        assert isinstance(source, DistributedSource)
        by_rank = {share.source_rank: 4 * int(share.pieces.num_elements.sum()) for share in plan.shares}
        far = sum(by_rank[peer] for peer in wanted.get(rank, []))
        links_wanted = {"local": by_rank[rank], "peer": sum(by_rank.values()) - by_rank[rank] - far, "host": far // 2}
        assert delivered.link_bytes == {link: size for link, size in links_wanted.items() if size}
        assert delivered.num_bytes == plan.minimum_bytes


def test_reading_in_place_that_was_asked_for_and_cannot_be_is_refused(monkeypatch):
    node = Node(monkeypatch, all_visible(2), GPUS[:2], expandable=[1])
    tensors = globals_of()
    layout = layout_of(tensors, 2)

    def work(rank, gather, leave):
        device = node.enter(rank)
        shards = {n: on_gpu(t, device.index) for n, t in shards_of(layout, tensors, rank).items()}
        source = IpcSource.connect(layout, IpcExport(layout, rank, shards), gather, device)
        trace = engine_trace(tensors, 0, 1, torch.float32)
        engine = [on_gpu(t, device.index) for t in empty_engine(trace)]
        with source.opened(1):
            source.deliver(make_plan(trace, layout, rank), engine)

    first, second = run_threads(work, 2)
    assert type(first) is HandoffError
    assert str(first).startswith(
        "the shards of rank 1 on localhost cannot be read in place: they lie in expandable seg"
    )
    assert str(first).endswith("Or have them sent: handoff.transport=auto or distributed")
    assert isinstance(second, PeerError) and "expandable" in str(second)


def test_memory_files_that_cannot_be_opened_are_replaced_by_messages(monkeypatch, sent, caplog):
    """Ranks of one host in two containers."""
    tensors = globals_of()
    layout = layout_of(tensors, 2)
    monkeypatch.setattr(ipc.os, "open", lambda *arguments: (_ for _ in ()).throw(FileNotFoundError("no such file")))

    def work(rank, gather, leave):
        source = connect(layout, rank, shards_of(layout, tensors, rank), gather=gather)
        trace = engine_trace(tensors, 0, 1, torch.float32)
        engine = empty_engine(trace)
        with source.opened(1):
            delivered = source.deliver(make_plan(trace, layout, rank), engine)
        assert is_equal(engine, expected(tensors, 0, 1, torch.float32))
        return type(source), sorted(delivered.link_bytes)

    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        assert run_threads(work, 2) == [(Sent, ["host", "local"])] * 2
    assert "rank 0 receives the weights of rank 1 by messages: the shards of rank 1 cannot be opened at" in caplog.text


def test_ranks_of_one_host_need_no_messages(sent):
    tensors = globals_of()
    layout = layout_of(tensors, 2)
    found = run_threads(
        lambda rank, gather, leave: type(connect(layout, rank, shards_of(layout, tensors, rank), gather=gather)), 2
    )
    assert found == [IpcSource, IpcSource]
