"""Plans: every element of the engine once, from a rank that holds it, in buckets that are not too large."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.resharding import (
    _check_shard_metadata_pair_overlap,
    _shards_get_overlap_region_wrt_saved_tensor,
)
from torch.distributed.tensor import Replicate, Shard

from hybrid_rl.errors import HandoffError
from hybrid_rl.extras.plan.traffic import PlanReport, Traffic, fsdp_layout, report_of
from hybrid_rl.resharding.layout import ShardedTensor, SourceLayout, TensorSpec
from hybrid_rl.resharding.rank_plan import make_plan
from tests.unit.resharding.cells import cell_of
from tests.unit.resharding.loading import Loading

MESHES = [(1,), (2,), (3,), (5,), (8,), (1, 2), (2, 2), (2, 3), (3, 2), (2, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def layout_of(loading: Loading, num_ranks: int, **options) -> SourceLayout:
    return fsdp_layout(loading.trace().sources, num_ranks, **options)


def written(loading: Loading, layout: SourceLayout, plan) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The memory of the destinations after a plan was carried out by hand, and how often each element was written."""
    named = {f"s{i}": tensor for i, tensor in enumerate(loading.sources)}
    parts = [
        [
            None if box is None else named[t.spec.name][box].flatten()
            for box in (cell_of(t, rank) for rank in range(len(layout.hosts)))
        ]
        for t in layout.tensors
    ]
    memory = [np.full(t.untyped_storage().nbytes() // t.itemsize, -1.0) for t in loading.destinations]
    counts = [np.zeros(len(values), dtype=int) for values in memory]
    for bucket in plan.buckets:
        p = bucket.pieces
        assert set(p.source_rank) == {bucket.source_rank}
        for i in range(len(p)):
            index = np.indices(p.shape[i]).reshape(4, -1)
            there = p.source_offset[i] + p.source_strides[i] @ index
            here = p.destination_offset[i] + p.destination_strides[i] @ index
            number = p.global_offset[i] + p.global_strides[i] @ index
            tensor = layout.tensors[p.source[i]]
            values = parts[p.source[i]][bucket.source_rank][there]
            assert torch.equal(values, named[tensor.spec.name].flatten()[number])
            dtype = loading.destinations[p.destination[i]].dtype  # bfloat16 rounds numbers above 256
            memory[p.destination[i]][here] = values.to(dtype).double().numpy()
            np.add.at(counts[p.destination[i]], here, 1)
    return memory, counts


def check(loading: Loading, layout: SourceLayout, rank: int, bucket_bytes: int):
    """Everything that must hold for a plan."""
    trace = loading.trace()
    plan = make_plan(trace, layout, rank, bucket_bytes=bucket_bytes)
    memory, counts = written(loading, layout, plan)
    for expected, values, count in zip(loading.destinations, memory, counts, strict=True):
        whole = torch.as_strided(expected, (len(values),), (1,), 0).double().numpy()
        is_copied = whole > 0  # sources hold numbers from 1
        assert np.array_equal(values[is_copied], whole[is_copied])
        assert np.array_equal(count, is_copied)
    itemsize = np.array([t.itemsize for t in loading.destinations])
    for bucket in plan.buckets:
        assert bucket.num_bytes == (bucket.pieces.num_elements * itemsize[bucket.pieces.destination]).sum()
        assert 0 < bucket.num_bytes <= bucket_bytes
    report = report_of(plan, trace, layout)
    assert report.total == report.minimum
    size = sum(t.numel() * t.itemsize for t in loading.destinations)
    assert report.total.written_bytes + report.constant_bytes == size
    assert report.num_pieces == sum(len(b.pieces) for b in plan.buckets) and report.num_buckets == len(plan.buckets)
    return plan


def reported(loading: Loading, layout: SourceLayout, rank: int) -> PlanReport:
    """The bytes of a plan, for which everything else holds too."""
    return report_of(check(loading, layout, rank, 1 << 20), loading.trace(), layout)


@st.composite
def loadings(draw):
    """An engine's tensors of the kinds that there are: fused and padded, cut along columns, transposed, stacked."""
    loading = Loading()
    size = st.integers(1, 6)
    part = st.tuples(st.integers(0, 3), size)  # what lies before the box that is taken, and its extent
    dtype = st.sampled_from(DTYPES)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["fused", "columns", "transposed", "stacked", "vector", "scalar"]))
        options = {"dtype": draw(dtype)}
        if kind == "fused":
            parts, columns, pad = draw(st.lists(part, min_size=1, max_size=3)), draw(size), draw(st.integers(0, 2))
            gap = draw(st.integers(0, 2))
            total = sum(extent for _, extent in parts)
            d = loading.destination(total + pad, columns, strides=(columns + gap, 1), **options)
            row = 0
            for before, extent in parts:
                s = loading.source(before + extent + draw(st.integers(0, 2)), columns, dtype=draw(dtype))
                target = loading.destinations[d][row : row + extent]
                loading.copy(s, [(before, before + extent), (0, columns)], d, target)
                row += extent
            if pad:
                loading.fill(d, loading.destinations[d][row:])
        elif kind in ("columns", "transposed"):
            rows, (before, columns), pad = draw(size), draw(part), draw(st.integers(0, 2))
            s = loading.source(rows, before + columns + draw(st.integers(0, 2)), dtype=draw(dtype))
            shape = (rows, columns + pad)
            d = loading.destination(*(shape if kind == "columns" else shape[::-1]), **options)
            target = loading.destinations[d] if kind == "columns" else loading.destinations[d].t()
            loading.copy(s, [(0, rows), (before, before + columns)], d, target[:, :columns])
            if pad:
                loading.fill(d, target[:, columns:])
        elif kind == "stacked":
            experts, rows, columns = draw(size), draw(size), draw(st.integers(1, 3))
            s = loading.source(experts, 2 * rows, columns, dtype=draw(dtype))
            d = loading.destination(experts, rows, 2, columns, **options)
            for expert in draw(st.permutations(range(experts))):
                for half in range(2):
                    box = [(expert, expert + 1), (half * rows, (half + 1) * rows), (0, columns)]
                    loading.copy(s, box, d, loading.destinations[d][expert : expert + 1, :, half])
        else:
            shape = [draw(size)] if kind == "vector" else []
            s = loading.source(*shape, dtype=draw(dtype))
            d = loading.destination(*shape, **options)
            loading.copy(s, [(0, extent) for extent in shape], d, loading.destinations[d])
    return loading


@st.composite
def layouts(draw, loading: Loading):
    """Every tensor placed at will on one mesh, and ranks on one to three hosts."""
    mesh_shape = draw(st.sampled_from(MESHES))
    num_ranks = int(np.prod(mesh_shape))
    mesh = np.array(draw(st.permutations(range(num_ranks)))).reshape(mesh_shape)
    tensors = []
    for spec in loading.trace().sources:
        kinds = [Replicate(), *(Shard(dim) for dim in range(len(spec.shape)))]
        tensors.append(ShardedTensor.of(spec, mesh, [draw(st.sampled_from(kinds)) for _ in mesh_shape]))
    tensors = draw(st.permutations(tensors))
    return SourceLayout(tuple(tensors), tuple(draw(st.sampled_from("abc")) for _ in range(num_ranks)))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_every_element_is_written_once_with_the_right_value(data):
    loading = data.draw(loadings())
    layout = data.draw(layouts(loading))
    rank = data.draw(st.integers(0, len(layout.hosts) - 1))
    check(loading, layout, rank, data.draw(st.sampled_from([8, 24, 100, 1 << 20])))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_nothing_is_read_from_farther_than_needed(data):
    loading = data.draw(loadings())
    layout = data.draw(layouts(loading))
    rank = data.draw(st.integers(0, len(layout.hosts) - 1))

    def distance(other: int) -> int:
        return 0 if other == rank else 1 if layout.hosts[other] == layout.hosts[rank] else 2

    for bucket in make_plan(loading.trace(), layout, rank).buckets:
        for number in np.unique(bucket.pieces.source):
            owners = layout.tensors[number].owners
            (holders,) = [group for group in owners.reshape(-1, owners.shape[-1]) if bucket.source_rank in group]
            assert distance(bucket.source_rank) == min(map(distance, holders))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_overlaps_are_those_of_torch_distributed_checkpoint(data):
    """Resharding one tensor: torch's own planner finds the same boxes."""
    loading = Loading()
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    s = loading.source(*shape)
    box = [(low, data.draw(st.integers(low + 1, n))) for n in shape for low in [data.draw(st.integers(0, n - 1))]]
    d = loading.destination(*(high - low for low, high in box))
    loading.copy(s, box, d, loading.destinations[d])
    layout = data.draw(layouts(loading))
    plan = make_plan(loading.trace(), layout, 0)
    wanted = ChunkStorageMetadata(torch.Size([a for a, _ in box]), torch.Size([b - a for a, b in box]))
    tensor, expected = layout.tensors[0], []
    cells = [cell for cell in (cell_of(tensor, rank) for rank in range(len(layout.hosts))) if cell is not None]
    for cell in {tuple((part.start, part.stop) for part in cell) for cell in cells}:
        held = ChunkStorageMetadata(torch.Size([a for a, _ in cell]), torch.Size([b - a for a, b in cell]))
        if _check_shard_metadata_pair_overlap(held, wanted):
            regions = _shards_get_overlap_region_wrt_saved_tensor(held, wanted)
            expected.append((int(np.prod([r[3] for r in regions])), tuple(r[1] for r in regions)))
    assert report_of(plan, loading.trace(), layout).total.read_bytes == 4 * sum(size for size, _ in expected)
    found = {}
    for bucket in plan.buckets:
        cell = cell_of(tensor, bucket.source_rank)
        key = tuple(part.start for part in cell)
        extents = [part.stop - part.start for part in cell]
        for i in range(len(bucket.pieces)):
            first = np.unravel_index(bucket.pieces.source_offset[i], extents)
            size, start = found.get(key, (0, tuple(first)))
            found[key] = (size + bucket.pieces.num_elements[i], min(start, tuple(first)))
    assert sorted(found.values()) == sorted(expected)


def test_a_fused_and_padded_tensor_by_hand():
    # gate and up, [4, 2] each in fp32, on two ranks by rows; the engine's second half of both, in bf16, with one row of
    # padding: rows 2 and 3 of each are rank 1's.
    loading = Loading()
    gate, up = loading.source(4, 2), loading.source(4, 2)
    d = loading.destination(5, 2, dtype=torch.bfloat16)
    loading.copy(gate, [(2, 4), (0, 2)], d, loading.destinations[d][:2])
    loading.copy(up, [(2, 4), (0, 2)], d, loading.destinations[d][2:4])
    loading.fill(d, loading.destinations[d][4:])
    plan = check(loading, layout_of(loading, 2), 0, 1 << 20)
    (bucket,) = plan.buckets
    assert bucket.source_rank == 1 and bucket.num_bytes == 16
    assert bucket.pieces.shape.tolist() == [[4, 1, 1, 1]] * 2
    assert bucket.pieces.source_offset.tolist() == [0, 0] and bucket.pieces.global_offset.tolist() == [4, 4]
    assert bucket.pieces.destination_offset.tolist() == [0, 4]
    report = reported(loading, layout_of(loading, 2), 0)
    assert (report.local, report.host, report.remote) == (Traffic(), Traffic(32, 16), Traffic())
    assert report.minimum == Traffic(32, 16) and report.constant_bytes == 4
    assert report.staging_bytes == 32
    assert reported(loading, layout_of(loading, 2), 1).local == Traffic(32, 16)


def test_a_large_piece_is_cut_by_rows():
    # 3 rows of 4 elements of 4 bytes: a bucket of 40 bytes has room for 2 rows, one of 8 bytes for half a row.
    loading = Loading()
    s, d = loading.source(3, 8), loading.destination(3, 4)
    loading.copy(s, [(0, 3), (0, 4)], d, loading.destinations[d])
    shapes = {}
    for bucket_bytes in (40, 8):
        plan = check(loading, layout_of(loading, 1), 0, bucket_bytes)
        shapes[bucket_bytes] = [bucket.pieces.shape[:, :2].tolist() for bucket in plan.buckets]
    assert shapes[40] == [[[2, 4]], [[4, 1]]] and shapes[8] == [[[2, 1]]] * 6
    with pytest.raises(HandoffError, match="bucket_bytes=3 is smaller than one element"):
        make_plan(loading.trace(), layout_of(loading, 1), 0, bucket_bytes=3)


def test_neighbouring_pieces_become_one():
    # 6 experts taken one by one, in any order, from 2 ranks: one piece each.
    loading = Loading()
    s, d = loading.source(6, 2, 3), loading.destination(6, 2, 3)
    for expert in (3, 0, 1, 5, 4, 2):
        loading.copy(s, [(expert, expert + 1), (0, 2), (0, 3)], d, loading.destinations[d][expert : expert + 1])
    plan = check(loading, layout_of(loading, 2), 0, 1 << 20)
    assert [bucket.pieces.shape.tolist() for bucket in plan.buckets] == [[[18, 1, 1, 1]]] * 2


def replicated(num_tensors: int, num_ranks: int, hosts) -> tuple[Loading, SourceLayout]:
    loading = Loading()
    for _ in range(num_tensors):
        s, d = loading.source(8), loading.destination(8)
        loading.copy(s, [(0, 8)], d, loading.destinations[d])
    return loading, layout_of(loading, num_ranks, replicas=2, hosts=hosts)


def test_the_nearest_copy_is_read():
    # Two replicas of two ranks: 0 and 1, 2 and 3. Rank 3 holds the second half; the first half is rank 0's and 2's.
    loading, layout = replicated(1, 4, hosts=("a", "a", "b", "b"))
    assert [bucket.source_rank for bucket in check(loading, layout, 3, 1024).buckets] == [3, 2]
    loading, layout = replicated(1, 4, hosts=("a", "a", "b", "a"))
    plan = check(loading, layout, 3, 1024)
    assert [bucket.source_rank for bucket in plan.buckets] == [3, 0]
    report = reported(loading, layout, 3)
    assert report.local == report.host == Traffic(16, 16) and report.remote == Traffic()
    assert reported(loading, layout, 2).remote == Traffic(16, 16)


def test_copies_equally_near_share_the_work():
    # Rank 4 of 5 holds nothing; ranks 0 and 2 hold the first halves, 1 and 3 the second ones, on another host.
    loading, layout = replicated(8, 4, hosts=("a",) * 4)
    layout = dataclasses.replace(layout, hosts=("a", "a", "a", "a", "b"))
    plan = check(loading, layout, 4, 1024)
    loads = {bucket.source_rank: bucket.num_bytes for bucket in plan.buckets}
    assert loads == {0: 64, 1: 64, 2: 64, 3: 64}
    assert reported(loading, layout, 4).remote == Traffic(256, 256)


def test_parts_and_tensors_of_any_shape_share_the_work():
    # One tensor that is taken in 4 parts, and tensors of which each is the only one of its shape; all on ranks 0 and 1.
    loading = Loading()
    s, d = loading.source(8), loading.destination(8)
    for begin in range(0, 8, 2):
        loading.copy(s, [(begin, begin + 2)], d, loading.destinations[d][begin : begin + 2])
    layout = dataclasses.replace(layout_of(loading, 2, replicas=2), hosts=("a", "a", "b"))
    assert [bucket.num_bytes for bucket in check(loading, layout, 2, 1024).buckets] == [16, 16]
    loading = Loading()
    for extent in (5, 6, 7, 8):
        s, d = loading.source(extent), loading.destination(extent)
        loading.copy(s, [(0, extent)], d, loading.destinations[d])
    layout = dataclasses.replace(layout_of(loading, 2, replicas=2), hosts=("a", "a", "b"))
    assert [len(bucket.pieces) for bucket in check(loading, layout, 2, 1024).buckets] == [2, 2]


def test_rows_of_different_length_stay_apart():
    loading = Loading()
    s, d = loading.source(4, 5), loading.destination(4, 5)
    for rows, columns in (((0, 2), (0, 3)), ((2, 4), (0, 2))):
        loading.copy(s, [rows, columns], d, loading.destinations[d][slice(*rows), slice(*columns)])
        loading.fill(d, loading.destinations[d][slice(*rows), columns[1] :])
    check(loading, layout_of(loading, 1), 0, 1 << 20)


def test_ranks_begin_with_different_peers():
    loading = Loading()
    s, d = loading.source(8), loading.destination(8)
    loading.copy(s, [(0, 8)], d, loading.destinations[d])
    layout = layout_of(loading, 4)
    orders = [[bucket.source_rank for bucket in make_plan(loading.trace(), layout, rank).buckets] for rank in range(4)]
    assert orders == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]


def test_the_digest_is_of_what_is_copied():
    loading, layout = replicated(2, 4, hosts=("a",) * 4)
    plan = make_plan(loading.trace(), layout, 1)
    assert plan.digest == make_plan(loading.trace(), layout, 1).digest
    pieces = plan.buckets[0].pieces
    moved = dataclasses.replace(pieces, destination_offset=pieces.destination_offset + 1)
    other = dataclasses.replace(plan, buckets=(dataclasses.replace(plan.buckets[0], pieces=moved), *plan.buckets[1:]))
    assert len({plan.digest, other.digest, make_plan(loading.trace(), layout, 0).digest}) == 3


def test_layouts_that_do_not_fit_are_refused():
    loading = Loading()
    s, d = loading.source(4, 2), loading.destination(4, 2)
    loading.copy(s, [(0, 4), (0, 2)], d, loading.destinations[d])
    trace = loading.trace()
    with pytest.raises(HandoffError, match=r"the engine takes s0 \[4, 2\], the trainer does not have it"):
        make_plan(trace, fsdp_layout([TensorSpec("s1", (4, 2), torch.float32)], 2), 0)
    with pytest.raises(HandoffError, match=r"the engine takes s0 \[4, 2\], the trainer has \[2, 4\]"):
        make_plan(trace, fsdp_layout([TensorSpec("s0", (2, 4), torch.float32)], 2), 0)
    with pytest.raises(HandoffError, match="rank 2 is not one of the 2 ranks"):
        make_plan(trace, layout_of(loading, 2), 2)
    with pytest.raises(HandoffError, match="of 8 elements 8 are missing"):
        make_plan(dataclasses.replace(trace, copies=trace.copies.select([])), layout_of(loading, 2), 0)
    one_row = np.array([1, 0, 0, 0])
    copies = dataclasses.replace(trace.copies, low=trace.copies.low + one_row, high=trace.copies.high + one_row)
    with pytest.raises(HandoffError, match=r"takes \[1, 0, 0, 0\] to \[5, 2, 1, 1\] of s0, whose shape is \[4, 2\]"):
        make_plan(dataclasses.replace(trace, copies=copies), layout_of(loading, 2), 0)
