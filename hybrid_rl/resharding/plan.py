"""The plan of a handoff for one rank: each element of its engine once, from a rank that holds it, in buckets.

Every rank plans for itself without communication: a plan depends only on the trace, the layout and the rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.pieces import divided, overlaps, simplified
from hybrid_rl.resharding.tables import Column, Copies, Pieces
from hybrid_rl.resharding.tiling import check_tiling
from hybrid_rl.resharding.trace import Trace

BUCKET_BYTES = 256 * 1024**2
LINKS = ("local", "host", "remote")


@dataclass(frozen=True)
class Traffic:
    """Bytes of the same elements: as read, in the source's dtype, and as written, in the destination's dtype."""

    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes)


@dataclass(frozen=True)
class PlanReport:
    """The bytes that a plan moves.

    local: from the rank itself; host: from other ranks of its host; remote: from other hosts.
    minimum: each element of the engine's tensors read and written once.
    constant_bytes: written without being read, such as padding.
    largest_bucket_bytes: among buckets from other ranks.
    """

    local: Traffic
    host: Traffic
    remote: Traffic
    minimum: Traffic
    constant_bytes: int
    num_pieces: int
    num_buckets: int
    largest_bucket_bytes: int

    @property
    def total(self) -> Traffic:
        """Over all links."""
        return self.local + self.host + self.remote

    @property
    def point_to_point_staging_bytes(self) -> int:
        """Extra peak memory of a receiver: one bucket that arrives, and one that is copied out."""
        return 2 * self.largest_bucket_bytes


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
    """The copies of one rank. The pieces' `source` is an index in the layout's tensors, `destination` one in the
    trace's destinations. Buckets begin with the rank's own part and continue with the next rank's, so that no two ranks
    read from the same one at the same time."""

    rank: int
    buckets: tuple[Bucket, ...]
    report: PlanReport

    @cached_property
    def shares(self) -> tuple[RankShare, ...]:
        """The buckets by source rank: what is read in place need not be cut into buckets."""
        found = [(rank, tuple(buckets)) for rank, buckets in groupby(self.buckets, lambda b: b.source_rank)]
        return tuple(RankShare(rank, each, Pieces.join([bucket.pieces for bucket in each])) for rank, each in found)

    def of_ranks(self, ranks: Collection[int]) -> Plan:
        """Return the part of the plan that comes from these ranks; the report stays that of the whole."""
        return replace(self, buckets=tuple(bucket for bucket in self.buckets if bucket.source_rank in ranks))

    @cached_property
    def digest(self) -> str:
        """A short hash of all copies and their order."""
        found = hashlib.blake2b(f"{self.rank}".encode(), digest_size=8)
        for bucket in self.buckets:
            found.update(f"{bucket.source_rank} {len(bucket.pieces)}".encode())
            for item in fields(bucket.pieces):
                found.update(np.ascontiguousarray(getattr(bucket.pieces, item.name)).data)
        return found.hexdigest()


def make_plan(trace: Trace, layout: SourceLayout, rank: int, *, bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """Plan the handoff to one rank, whose engine takes what `trace` says, from ranks that hold what `layout` says.

    bucket_bytes: the most that a bucket writes; a larger piece is cut by rows. Raises HandoffError if the trace does
    not write each element exactly once, the layout lacks a tensor or has it in another shape, or bucket_bytes is
    smaller than an element.
    """
    check_tiling(trace.copies, trace.fills, trace.destinations, trace.untraced.keys())
    if not 0 <= rank < len(layout.hosts):
        raise HandoffError(f"rank {rank} is not one of the {len(layout.hosts)} ranks of the layout")
    copies = _in_layout(trace, layout)
    written = np.array([spec.dtype.itemsize for spec in trace.destinations], dtype=np.int64)
    read = np.array([tensor.spec.dtype.itemsize for tensor in layout.tensors], dtype=np.int64)
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
    links = traffic(pieces, layout, rank, read, written)
    fill_elements = trace.fills.shape.prod(axis=1)
    report = PlanReport(
        **links,
        minimum=_minimum(trace, copies, read, written),
        constant_bytes=int((fill_elements * written[trace.fills.destination]).sum()),
        num_pieces=len(pieces),
        num_buckets=len(buckets),
        largest_bucket_bytes=max([0, *(b.num_bytes for b in buckets if b.source_rank != rank)]),
    )
    return Plan(rank, buckets, report)


def _in_layout(trace: Trace, layout: SourceLayout) -> Copies:
    """Return the copies with sources numbered as in the layout."""
    index = {tensor.spec.name: i for i, tensor in enumerate(layout.tensors)}
    used = np.unique(trace.copies.source)
    found = np.full(len(trace.sources), -1, dtype=np.int64)
    for number in used.tolist():
        spec = trace.sources[number]
        held = layout.tensors[index[spec.name]].spec if spec.name in index else None
        if held is None or held.shape != spec.shape:
            there = "does not have it" if held is None else f"has {list(held.shape)}"
            raise HandoffError(
                f"the engine takes {spec.name} {list(spec.shape)}, the trainer {there}; build both from one config"
            )
        found[number] = index[spec.name]
    return replace(trace.copies, source=found[trace.copies.source])


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


def traffic(pieces: Pieces, layout: SourceLayout, rank: int, read: Column, written: Column) -> dict[str, Traffic]:
    """Return what a rank reads over each link (LINKS). read [sources], written [destinations]: bytes of an element."""
    near = np.array([host == layout.hosts[rank] for host in layout.hosts])
    link = np.where(pieces.source_rank == rank, 0, np.where(near[pieces.source_rank], 1, 2))
    elements = pieces.num_elements
    return {
        name: Traffic(
            int((elements * read[pieces.source])[link == number].sum()),
            int((elements * written[pieces.destination])[link == number].sum()),
        )
        for number, name in enumerate(LINKS)
    }


def _minimum(trace: Trace, copies: Copies, read: Column, written: Column) -> Traffic:
    """Count each element once: written are the destinations' elements without constants, read those that are copied."""
    elements = np.array([spec.num_elements for spec in trace.destinations], dtype=np.int64)
    elements[[spec.name in trace.untraced for spec in trace.destinations]] = 0
    np.subtract.at(elements, trace.fills.destination, trace.fills.shape.prod(axis=1))
    taken = (copies.high - copies.low).prod(axis=1)
    return Traffic(int((taken * read[copies.source]).sum()), int((elements * written).sum()))
