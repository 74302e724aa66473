"""Ranks on named axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from hybrid_rl.errors import ConfigError

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
DATA_AXES = ("dp_replicate", "dp_shard")  # ranks that differ on the other axes only have the same samples


class RankMesh:
    """Ranks 0 .. num_ranks - 1 laid out row by row over AXES, the last axis running fastest.

    shape: sizes by axis; axes left out have size 1. Raises ConfigError for an unknown axis or a size below 1.
    """

    def __init__(self, shape: Mapping[str, int]) -> None:
        check_axes(shape)
        wrong = {axis: size for axis, size in shape.items() if size < 1}
        if wrong:
            raise ConfigError(f"mesh axes {wrong} must have at least one rank")
        self.shape: Mapping[str, int] = MappingProxyType({axis: shape.get(axis, 1) for axis in AXES})

    def __reduce__(self) -> tuple[type[RankMesh], tuple[dict[str, int]]]:
        return RankMesh, (dict(self.shape),)

    def __repr__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.shape.items() if size > 1) or "one rank"

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.shape.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on every axis."""
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of {self.num_ranks}")
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.shape[axis])
        return {axis: found[axis] for axis in AXES}

    def num_shards(self, axes: Collection[str]) -> int:
        """Parts that a split over `axes` makes."""
        check_axes(axes)
        return math.prod(self.shape[axis] for axis in axes)

    def shard_of(self, rank: int, axes: Collection[str]) -> int:
        """The part that a rank gets of a split over `axes`; ranks that differ on other axes only get the same one."""
        check_axes(axes)
        place, shard = self.coordinates(rank), 0
        for axis in AXES:
            if axis in axes:
                shard = shard * self.shape[axis] + place[axis]
        return shard

    def leaders(self, axes: Collection[str]) -> tuple[int, ...]:
        """The ranks at coordinate 0 of all axes but `axes`: one for each part, in the order of the parts."""
        check_axes(axes)
        places = ((rank, self.coordinates(rank)) for rank in range(self.num_ranks))
        return tuple(rank for rank, place in places if not any(place[axis] for axis in AXES if axis not in axes))


def check_axes(axes: Collection[str]) -> None:
    """Raises ConfigError for axes that do not exist."""
    unknown = sorted(set(axes) - set(AXES))
    if unknown:
        raise ConfigError(f"mesh axes {unknown} do not exist; there are {', '.join(AXES)}")
