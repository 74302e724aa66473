"""The links between ranks, chosen once for a run, and a source that uses several of them.

The rule, for the parts of one rank and the engine of another:

1. the same rank, or the same GPU: copied within that memory;
2. the same host: read in place, from the memory file of a rank on a CPU, or by the copy kernel over the link from a GPU
   whose memory this one can access;
3. anything else (another host, a GPU that is not visible or not accessible, memory that cannot be shared): sent by
   messages, bucket by bucket.

All ranks know all links before the first byte moves, because messages need both ends.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from hybrid_rl.memory import Region
from hybrid_rl.resharding.handoff.base import Delivered, Gather, Parts, Source, gathered
from hybrid_rl.resharding.handoff.distributed import DistributedSource
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.plan import Plan

_logger = logging.getLogger("hybrid_rl")


def connect(
    layout: SourceLayout,
    rank: int,
    tensors: Mapping[str, Tensor],
    *,
    regions: Sequence[Region] = (),
    device: torch.device | None = None,
    gather: Gather,
    timeout_seconds: float = 120.0,
) -> Source:
    """Make the source of a trainer rank among trainer ranks, with a way for each link. Collective.

    tensors: this rank's, plain or DTensor, by name.
    regions: the memory of those on the host.
    device: of this rank's engine.

    Messages between ranks of one host are logged, with the reason.
    """
    export = IpcExport(layout, rank, tensors, regions)
    reader = IpcSource.connect(layout, export, gather, device)
    obstacles = {peer: why for peer in range(len(layout.hosts)) if (why := reader.obstacle(peer))}
    near = {peer: why for peer, why in obstacles.items() if layout.hosts[peer] == layout.hosts[rank]}
    for why in dict.fromkeys(near.values()):
        peers = ", ".join(str(peer) for peer in near if near[peer] == why)
        _logger.warning("handoff: rank %d receives the weights of rank %s by messages: %s", rank, peers, why)
    if not any(gathered(gather, len(obstacles), "which ranks can read each other's memory")):
        return reader
    messages = DistributedSource(layout, rank, tensors, gather=gather, timeout_seconds=timeout_seconds)
    return MixedSource(reader, messages, obstacles.keys())


class MixedSource(Source):
    """A source that reads what this rank can read in place, and receives the rest.

    reader, messages: sources with one layout and the same participants.
    sent: the ranks whose parts this one cannot read."""

    def __init__(self, reader: IpcSource, messages: DistributedSource, sent: Collection[int]) -> None:
        self._reader, self._messages, self._sent = reader, messages, frozenset(sent)
        self._layout, self._gather = reader.layout(), reader.gather
        self.waits_for = reader.waits_for
        self._split: tuple[Plan, Plan, Plan] | None = None

    def held(self) -> Mapping[int, Parts]:
        """Return this rank's own parts, by rank."""
        return self._reader.held()

    def full(self, name: str) -> Tensor:
        """Broadcast the cells of one tensor. Collective."""
        return self._messages.full(name)

    def prepare(self, version: int) -> None:
        """Prepare both sources."""
        super().prepare(version)
        self._reader.prepare(version)
        self._messages.prepare(version)

    def deliver(
        self, plan: Plan, destinations: Sequence[Tensor], *, hashes: Tensor | None = None, seeds: Tensor | None = None
    ) -> Delivered:
        """Read, then send and receive. Collective."""
        read, sent = self._parts_of(plan)
        first = self._reader.deliver(read, destinations, hashes=hashes, seeds=seeds)
        # Also if nothing is sent to this rank, because others may wait for its messages.
        second = self._messages.deliver(sent, destinations, hashes=hashes, seeds=seeds)
        return Delivered(
            num_bytes=first.num_bytes + second.num_bytes,
            link_bytes=dict(Counter(first.link_bytes) + Counter(second.link_bytes)),
            num_pieces=first.num_pieces + second.num_pieces,
            num_buckets=first.num_buckets + second.num_buckets,
            staging_bytes=max(first.staging_bytes, second.staging_bytes),
            minimum_bytes=plan.minimum_bytes,
        )

    def close(self) -> None:
        """Close both sources."""
        self._messages.close()
        self._reader.close()

    def _parts_of(self, plan: Plan) -> tuple[Plan, Plan]:
        """Split a plan into what is read and what is sent; cached, because a plan serves many handoffs."""
        if self._split is None or self._split[0] is not plan:
            ranks = set(range(len(self.layout().hosts)))
            self._split = plan, plan.of_ranks(ranks - self._sent), plan.of_ranks(self._sent)
        return self._split[1], self._split[2]
