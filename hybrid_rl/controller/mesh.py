"""Ranks on named axes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from hybrid_rl.errors import ConfigError


@dataclass(frozen=True)
class RankMesh:
    """Ranks 0 .. num_ranks - 1 laid out row by row, the last axis running fastest: sizes by axis.

    Ranks that differ on dp_replicate or dp_shard, the data axes, have different samples; those that differ only on the
    others (two halves of a layer, say) have the same. A batch is split into one part for each data rank. Raises
    ConfigError for a size below 1.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        wrong = {axis: size for axis, size in asdict(self).items() if size < 1}
        if wrong:
            raise ConfigError(f"mesh axes {wrong} must have at least one rank")

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod((self.dp_replicate, self.dp_shard, self.cp, self.tp, self.ep))

    @property
    def num_data_ranks(self) -> int:
        """Parts into which a batch is split."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Return the part of a batch that a rank gets."""
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of {self.num_ranks}")
        return rank // (self.num_ranks // self.num_data_ranks)

    @property
    def data_leaders(self) -> range:
        """The first rank of each part, in the order of the parts."""
        return range(0, self.num_ranks, self.num_ranks // self.num_data_ranks)
