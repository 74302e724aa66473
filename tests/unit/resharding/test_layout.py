"""Which rank holds which part of a tensor."""

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hybrid_rl.errors import HandoffError
from hybrid_rl.extras.plan.traffic import fsdp_layout
from hybrid_rl.resharding.layout import ShardedTensor, SourceLayout, TensorSpec
from hybrid_rl.weights.boxes import local_box
from hybrid_rl.weights.sources import named_weights
from tests.support.libraries.torch_names import FakeStore, compute_shape_and_offset
from tests.unit.resharding.cells import cell_of

MESHES = [(1,), (2,), (3,), (5,), (8,), (1, 4), (2, 2), (2, 3), (3, 2), (4, 2), (2, 2, 2)]


@pytest.fixture
def world():
    """A process group of 4 ranks of which only rank 0 is there: nothing can be communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def spec(*shape: int, name: str = "w") -> TensorSpec:
    return TensorSpec(name, shape, torch.float32)


@st.composite
def placed(draw):
    """A shape, a mesh of ranks in any order, and a placement for each axis."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh_shape = draw(st.sampled_from(MESHES))
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = tuple(draw(st.sampled_from(kinds)) for _ in mesh_shape)
    ranks = draw(st.permutations(range(int(np.prod(mesh_shape)))))
    return shape, np.array(ranks, dtype=np.int32).reshape(mesh_shape), placements


@settings(deadline=None, max_examples=200)
@given(placed())
def test_every_rank_holds_what_dtensor_says(case):
    shape, mesh, placements = case
    tensor = ShardedTensor.of(spec(*shape), mesh, placements)
    for coordinate in np.ndindex(mesh.shape):
        extent, offset = compute_shape_and_offset(shape, mesh.shape, list(coordinate), placements)
        cell = cell_of(tensor, int(mesh[coordinate]))
        if 0 in extent:
            assert cell is None
        else:
            assert cell == tuple(slice(low, low + length) for low, length in zip(offset, extent, strict=True))


@settings(deadline=None)
@given(placed())
def test_parts_are_the_cells_of_all_tensors(case):
    shape, mesh, placements = case
    scalar = ShardedTensor.of(spec(), mesh, [Replicate()] * mesh.ndim)
    tensors = (ShardedTensor.of(spec(*shape), mesh, placements), scalar)
    layout = SourceLayout(tensors, ("here",) * mesh.size)
    for rank in range(mesh.size):
        low, high = layout.parts(rank)
        cell = cell_of(tensors[0], rank)
        filled = [] if cell is None else [(part.start, part.stop) for part in cell] + [(0, 1)] * (4 - len(shape))
        assert list(zip(low[0], high[0], strict=True)) == (filled or [(0, 0)] * 4)
        assert high[1].tolist() == [1, 1, 1, 1] and low[1].tolist() == [0, 0, 0, 0]


def test_uneven_chunks_leave_ranks_without_a_part():
    # torch.chunk of 10 rows by 8: five chunks of two.
    tensor = ShardedTensor.of(spec(10, 3), np.arange(8), [Shard(0)])
    assert tensor.cuts == ((0, 2, 4, 6, 8, 10), (0, 3))
    assert tensor.owners.tolist() == [[[0]], [[1]], [[2]], [[3]], [[4]]]
    assert cell_of(tensor, 4) == (slice(8, 10), slice(0, 3)) and cell_of(tensor, 5) is None


def test_two_axes_on_one_dim_and_copies():
    # 5 rows: the first axis cuts 3 | 2, the second one 2 | 1 and 1 | 1; the third makes copies.
    tensor = ShardedTensor.of(spec(5), np.arange(8).reshape(2, 2, 2), [Shard(0), Shard(0), Replicate()])
    assert tensor.cuts == ((0, 2, 3, 4, 5),)
    assert tensor.owners.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_fsdp_over_tensor_parallelism_interleaves_its_chunks():
    # DTensor's own example: rows 0-1, 4-5, 2-3, 6-7 on ranks 0 to 3.
    tensor = ShardedTensor.of(spec(8, 8), np.arange(4).reshape(2, 2), [_StridedShard(0, split_factor=2), Shard(0)])
    assert [cell_of(tensor, rank)[0] for rank in range(4)] == [slice(0, 2), slice(4, 6), slice(2, 4), slice(6, 8)]


def test_a_part_that_is_no_box_or_no_value_is_refused():
    with pytest.raises(HandoffError, match=r"w \[8\]: a rank's part is not a box"):
        ShardedTensor.of(spec(8), np.arange(2), [_StridedShard(0, split_factor=2)])
    with pytest.raises(HandoffError, match="no rank holds its values"):
        ShardedTensor.of(spec(8), np.arange(2), [Partial()])
    layout = fsdp_layout([spec(1, 1, 1, 1, 1)], 2)
    with pytest.raises(HandoffError, match="w has 5 dims; at most 4"):
        layout.parts(0)


def test_the_layout_of_a_sharded_module(world):
    module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10)).to("meta")
    fully_shard(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    layout = SourceLayout.of(named_weights(module), ("a", "a", "b", "b"))
    found = {tensor.spec.name: tensor for tensor in layout.tensors}
    assert list(found) == sorted(named_weights(module))
    assert found["0.weight"].owners.tolist() == [[[0, 2]], [[1, 3]]]
    assert found["0.weight"].cuts == ((0, 5, 10), (0, 6))
    assert found["1.running_mean"].owners.tolist() == [[0, 1, 2, 3]]  # a buffer, on all ranks
    for name, parameter in module.named_parameters():
        assert cell_of(found[name], 0) == local_box(parameter)
    planned = fsdp_layout(
        [t.spec for t in layout.tensors if "running" not in t.spec.name], 4, replicas=2, hosts=("a", "a", "b", "b")
    )
    kept = tuple(t for t in layout.tensors if "running" not in t.spec.name)
    assert planned.digest() == SourceLayout(kept, layout.hosts).digest()


def test_tensors_of_one_shape_share_their_cells(world):
    mesh = init_device_mesh("cpu", (4,))
    named = {name: distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)], src_data_rank=None) for name in "ab"}
    a, b = SourceLayout.of(named, ("here",) * 4).tensors
    assert a.cuts is b.cuts and a.owners is b.owners


def test_plain_tensors_lie_where_they_are_said_to():
    tensors = {"w": torch.zeros(3, 2), "scale": torch.zeros(())}
    layout = SourceLayout.of(tensors, ("here",) * 3)
    assert [t.owners.tolist() for t in layout.tensors] == [[0, 1, 2], [[[0, 1, 2]]]]
    assert all(cell_of(layout.tensors[1], rank) == (slice(0, 3), slice(0, 2)) for rank in range(3))


def test_the_digest_tells_layouts_apart():
    def digest(num_rows=6, name="w", ranks=4, replicas=1, hosts=None):
        return fsdp_layout([spec(num_rows, 2, name=name)], ranks, replicas=replicas, hosts=hosts).digest()

    layout = fsdp_layout([spec(6, 2)], 4)
    assert pickle.loads(pickle.dumps(layout)).digest() == layout.digest() == digest()
    others = [digest(7), digest(name="v"), digest(ranks=3), digest(replicas=2), digest(hosts="abcd")]
    swapped = SourceLayout((ShardedTensor.of(spec(6, 2), np.array([1, 0, 2, 3]), [Shard(0)]),), layout.hosts)
    assert len({digest(), swapped.digest(), *others}) == 7
    with pytest.raises(HandoffError, match="replicas=3 does not divide num_ranks=4"):
        digest(replicas=3)
