"""The choice of the links between ranks, made once for a run.

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
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid_rl.memory.region import Region
from hybrid_rl.resharding.handoff.base import Gather, Source, gathered
from hybrid_rl.resharding.handoff.distributed import DistributedSource
from hybrid_rl.resharding.handoff.ipc import IpcExport, IpcSource
from hybrid_rl.resharding.layout import SourceLayout

_logger = logging.getLogger("hybrid_rl")


def connect(
    layout: SourceLayout,
    rank: int,
    tensors: Mapping[str, Tensor],
    *,
    regions: Sequence[Region] = (),
    device: torch.device | None = None,
    gather: Gather,
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
    return DistributedSource(layout, rank, tensors, gather=gather, reader=reader, sent=obstacles.keys())
