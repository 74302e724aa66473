"""The bytes of a handoff by link, counted from a plan: for ranks that exist and for hypothetical ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor import Replicate, Shard

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.copy_tables import MAX_DIMS, Column, Copies, Pieces
from hybrid_rl.resharding.layout import ShardedTensor, SourceLayout, TensorSpec
from hybrid_rl.resharding.pieces import overlaps
from hybrid_rl.resharding.rank_plan import Plan
from hybrid_rl.resharding.trace import Trace

LINKS = ("local", "host", "remote")


def fsdp_layout(
    specs: Iterable[TensorSpec], num_ranks: int, *, replicas: int = 1, hosts: Sequence[str] | None = None
) -> SourceLayout:
    """Make the layout that FSDP2 would give tensors on hypothetical ranks: dim 0 sharded, scalars on every rank.

    replicas: groups of num_ranks / replicas consecutive ranks that each hold everything (HSDP).
    hosts: by rank; by default all ranks are on one.
    """
    if num_ranks % replicas:
        raise HandoffError(f"replicas={replicas} does not divide num_ranks={num_ranks}; choose a divisor of it")
    mesh = np.arange(num_ranks, dtype=np.int32).reshape(replicas, -1)
    tensors = [
        ShardedTensor.of(spec, mesh, (Replicate(), Shard(0) if spec.shape else Replicate()))
        for spec in sorted(specs, key=lambda spec: spec.name)
    ]
    return SourceLayout(tuple(tensors), tuple(hosts) if hosts is not None else ("localhost",) * num_ranks)


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
    staging_bytes: extra peak memory of a receiver of messages, one bucket that arrives and one that is copied out.
    """

    local: Traffic
    host: Traffic
    remote: Traffic
    minimum: Traffic
    constant_bytes: int
    num_pieces: int
    num_buckets: int
    staging_bytes: int

    @property
    def total(self) -> Traffic:
        """The sum over all links."""
        return self.local + self.host + self.remote


def report_of(plan: Plan, trace: Trace, layout: SourceLayout) -> PlanReport:
    """Count the bytes of a plan that was made from this trace and layout."""
    written = np.array([spec.dtype.itemsize for spec in trace.destinations], dtype=np.int64)
    read = np.array([tensor.spec.dtype.itemsize for tensor in layout.tensors], dtype=np.int64)
    links = {name: Traffic() for name in LINKS}
    for share in plan.shares:
        for name, part in traffic(share.pieces, layout, plan.rank, read, written).items():
            links[name] += part
    size_of = {tensor.spec.name: tensor.spec.dtype.itemsize for tensor in layout.tensors}
    of_sources = np.array([size_of.get(spec.name, 0) for spec in trace.sources], dtype=np.int64)
    taken = (trace.copies.high - trace.copies.low).prod(axis=1)
    fill_elements = trace.fills.shape.prod(axis=1)
    return PlanReport(
        **links,
        minimum=Traffic(int((taken * of_sources[trace.copies.source]).sum()), plan.minimum_bytes),
        constant_bytes=int((fill_elements * written[trace.fills.destination]).sum()),
        num_pieces=sum(len(bucket.pieces) for bucket in plan.buckets),
        num_buckets=len(plan.buckets),
        staging_bytes=2 * max([0, *(b.num_bytes for b in plan.buckets if b.source_rank != plan.rank)]),
    )


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


def gathered(layout: SourceLayout, rank: int) -> dict[str, Traffic]:
    """What `full_tensor` receives on a rank over each link, in the trainer's dtype."""
    shape = np.ones((len(layout.tensors), MAX_DIMS), dtype=np.int64)
    for row, tensor in enumerate(layout.tensors):
        shape[row, : len(tensor.spec.shape)] = tensor.spec.shape
    number, zeros = np.arange(len(shape), dtype=np.int64), np.zeros_like(shape)
    read = np.array([tensor.spec.dtype.itemsize for tensor in layout.tensors], dtype=np.int64)
    whole = Copies(number, zeros, shape, number, zeros[:, 0], zeros)
    return traffic(overlaps(whole, layout, read, rank), layout, rank, read, read)
