from __future__ import annotations

import itertools
import pickle
from dataclasses import astuple, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.controller import RankMesh
from hybrid_rl.errors import ConfigError

AXES = [axis.name for axis in fields(RankMesh)]
meshes = st.builds(RankMesh, **{axis: st.integers(1, 3) for axis in AXES})


def test_axis_names_are_fixed() -> None:
    assert AXES == ["dp_replicate", "dp_shard", "cp", "tp", "ep"]


def test_places_by_hand() -> None:
    """Two replicas of two shards, two tensor-parallel ranks each: 8 ranks, tensor-parallel partners side by side."""
    mesh = RankMesh(dp_replicate=2, dp_shard=2, tp=2)
    assert mesh.num_ranks == 8 and mesh.num_data_ranks == 4 and [*mesh.data_leaders] == [0, 2, 4, 6]
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@settings(deadline=None, max_examples=60)
@given(meshes)
def test_ranks_that_agree_on_the_data_axes_share_a_part(mesh: RankMesh) -> None:
    """Row by row over the axes: product's last factor runs fastest."""
    places = list(itertools.product(*map(range, astuple(mesh))))
    parts = sorted({place[:2] for place in places})
    assert len(places) == mesh.num_ranks and len(parts) == mesh.num_data_ranks
    assert [mesh.data_rank(rank) for rank in range(mesh.num_ranks)] == [parts.index(place[:2]) for place in places]
    assert [*mesh.data_leaders] == [rank for rank, place in enumerate(places) if not any(place[2:])]


def test_travels() -> None:
    assert pickle.loads(pickle.dumps(RankMesh(2, 3))) == RankMesh(2, 3)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"\{'tp': 0\} must have at least one rank"):
        RankMesh(tp=0)
    with pytest.raises(IndexError, match="rank 2 of 2"):
        RankMesh(tp=2).data_rank(2)
