from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.controller import AXES, RankMesh
from hybrid_rl.errors import ConfigError

shapes = st.fixed_dictionaries({}, optional={axis: st.integers(1, 3) for axis in AXES}).map(RankMesh)
some_axes = st.sets(st.sampled_from(AXES)).map(tuple)


def test_axis_names_are_fixed() -> None:
    assert AXES == ("dp_replicate", "dp_shard", "cp", "tp", "ep")


def test_places_by_hand() -> None:
    """Two replicas of two shards, two tensor-parallel ranks each: 8 ranks, tensor-parallel partners side by side."""
    mesh = RankMesh({"dp_replicate": 2, "dp_shard": 2, "tp": 2})
    assert mesh.num_ranks == 8 and repr(mesh) == "dp_replicate 2 x dp_shard 2 x tp 2"
    assert mesh.coordinates(6) == {"dp_replicate": 1, "dp_shard": 1, "cp": 0, "tp": 0, "ep": 0}
    data = ("dp_replicate", "dp_shard")
    assert mesh.num_shards(data) == 4 and mesh.leaders(data) == (0, 2, 4, 6)
    assert [mesh.shard_of(rank, data) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [mesh.shard_of(rank, ("dp_shard",)) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert mesh.leaders(("dp_shard",)) == (0, 2) and mesh.leaders(()) == (0,)


@settings(deadline=None, max_examples=60)
@given(shapes)
def test_every_place_has_one_rank(mesh: RankMesh) -> None:
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.num_ranks)]
    # product's last factor runs fastest.
    assert places == list(itertools.product(*(range(size) for size in mesh.shape.values())))


@settings(deadline=None, max_examples=60)
@given(shapes, some_axes)
def test_leaders_cover_every_part_once(mesh: RankMesh, axes: tuple[str, ...]) -> None:
    assert [mesh.shard_of(rank, axes) for rank in mesh.leaders(axes)] == list(range(mesh.num_shards(axes)))


@settings(deadline=None, max_examples=60)
@given(shapes, some_axes)
def test_replicas_share_a_part(mesh: RankMesh, axes: tuple[str, ...]) -> None:
    """Two ranks have the same part exactly where they agree on the axes of the split."""
    places = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]
    for one, other in itertools.combinations(range(mesh.num_ranks), 2):
        agree = all(places[one][axis] == places[other][axis] for axis in axes)
        assert (mesh.shard_of(one, axes) == mesh.shard_of(other, axes)) is agree


@settings(deadline=None, max_examples=60)
@given(shapes)
def test_travels(mesh: RankMesh) -> None:
    assert pickle.loads(pickle.dumps(mesh)).shape == mesh.shape


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"mesh axes \['pp'\] do not exist; there are dp_replicate"):
        RankMesh({"pp": 2})
    with pytest.raises(ConfigError, match=r"\{'tp': 0\} must have at least one rank"):
        RankMesh({"tp": 0})
    with pytest.raises(IndexError, match="rank 2 of 2"):
        RankMesh({"tp": 2}).coordinates(2)
    with pytest.raises(ConfigError, match=r"\['pp'\] do not exist"):
        RankMesh({}).leaders(("pp",))
