"""The plan of a handoff for one rank: each element of its engine once, from a rank that holds it, in buckets.

Every rank plans for itself without communication: a plan depends only on the trace, the layout and the rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import Column, Pieces
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.pieces import divided, overlaps, simplified
from hybrid_rl.resharding.tiling import check_tiling
from hybrid_rl.resharding.trace import Trace

BUCKET_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Bucket:
    """Pieces from one rank. num_bytes: as written."""

    source_rank: int
    pieces: Pieces
    num_bytes: int


@dataclass(frozen=True)
class RankShare:
    """The part of a plan that comes from one rank: its buckets, with all of their pieces."""

    source_rank: int
    buckets: tuple[Bucket, ...]
    pieces: Pieces


@dataclass(frozen=True)
class Plan:
    """The copies of one rank.

    buckets: begin with the rank's own part and continue with the next rank's, so that no two ranks read from the same
    one at the same time. The pieces' `source` is an index in the layout's tensors, `destination` one in the trace's
    destinations.
    minimum_bytes: of the engine's tensors, if every element but constants is written once.
    """

    rank: int
    buckets: tuple[Bucket, ...]
    minimum_bytes: int

    @cached_property
    def shares(self) -> tuple[RankShare, ...]:
        """The buckets by source rank: what is read in place need not be cut into buckets."""
        groups = [(rank, tuple(buckets)) for rank, buckets in groupby(self.buckets, lambda b: b.source_rank)]
        return tuple(RankShare(rank, each, Pieces.join([bucket.pieces for bucket in each])) for rank, each in groups)

    @cached_property
    def digest(self) -> str:
        """A short hash of all copies and their order."""
        hasher = hashlib.blake2b(f"{self.rank}".encode(), digest_size=8)
        for bucket in self.buckets:
            hasher.update(f"{bucket.source_rank} {len(bucket.pieces)}".encode())
            hasher.update(bucket.pieces.content())
        return hasher.hexdigest()


def make_plan(trace: Trace, layout: SourceLayout, rank: int, *, bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """Plan the handoff to one rank, whose engine takes what `trace` says, from ranks that hold what `layout` says.

    bucket_bytes: the most that a bucket writes; a larger piece is cut by rows. Raises HandoffError if the trace does
    not write each element exactly once, the layout lacks a tensor or has it in another shape, or bucket_bytes is
    smaller than an element.
    """
    check_tiling(trace)
    if not 0 <= rank < len(layout.hosts):
        raise HandoffError(f"rank {rank} is not one of the {len(layout.hosts)} ranks of the layout")
    copies = replace(trace.copies, source=layout.numbers_of(trace.sources, trace.copies.source))
    written = np.array([spec.dtype.itemsize for spec in trace.destinations], dtype=np.int64)
    if bucket_bytes < written.max(initial=1):
        raise HandoffError(f"bucket_bytes={bucket_bytes} is smaller than one element; use some megabytes")
    pieces = simplified(overlaps(copies, layout, written[copies.destination], rank))
    pieces, _ = divided(pieces, written[pieces.destination], bucket_bytes)
    turn = (pieces.source_rank - rank) % len(layout.hosts)
    pieces = pieces.select(np.lexsort((pieces.destination_offset, pieces.destination, turn)))
    num_bytes = pieces.num_elements * written[pieces.destination]
    buckets = tuple(
        Bucket(int(pieces.source_rank[begin]), pieces.select(slice(begin, end)), int(num_bytes[begin:end].sum()))
        for begin, end in _cut(pieces.source_rank, num_bytes, bucket_bytes)
    )
    return Plan(rank, buckets, _minimum_bytes(trace, written))


def _cut(source_rank: Column, num_bytes: Column, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of stretches of one source rank and at most bucket_bytes, which no piece exceeds."""
    total = np.concatenate([[0], np.cumsum(num_bytes)])
    ends = np.append(np.flatnonzero(np.diff(source_rank)) + 1, len(source_rank))
    begin = 0
    for end in ends.tolist():
        while begin < end:
            fits = int(np.searchsorted(total, total[begin] + bucket_bytes, side="right")) - 1
            yield begin, min(fits, end)
            begin = min(fits, end)


def _minimum_bytes(trace: Trace, written: Column) -> int:
    """Count the destinations' elements once, without constants. written [destinations]: bytes of an element."""
    elements = np.array([spec.num_elements for spec in trace.destinations], dtype=np.int64)
    elements[[spec.name in trace.untraced for spec in trace.destinations]] = 0
    np.subtract.at(elements, trace.fills.destination, trace.fills.shape.prod(axis=1))
    return int((elements * written).sum())
