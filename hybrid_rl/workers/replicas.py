"""The machines of the ranks that share an engine."""

from __future__ import annotations

import socket

from hybrid_rl.checkpoint.owners import Owner
from hybrid_rl.config.schema import ColocatedRolloutConfig, RolloutConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.controller.session import shared_memory
from hybrid_rl.errors import ConfigError


def check_replicas(config: RolloutConfig, context: RankContext) -> None:
    """Raise ConfigError, on all ranks, if the ranks of a replica on CPUs do not have the shared memory in common in
    which they would meet. Collective."""
    size = config.ranks_per_engine if isinstance(config, ColocatedRolloutConfig) else 1
    if size == 1 or context.device.type != "cpu":
        return
    memory = shared_memory()
    own = (Owner.here().kernel, memory.stat().st_dev if memory is not None else -1)
    places = context.gather((own, socket.gethostname()))
    for first in range(0, len(places), size):
        memories, hosts = zip(*places[first : first + size], strict=True)
        if len(set(memories)) > 1:
            raise ConfigError(
                f"rollout.tensor_parallel_size={size}: ranks {first} to {first + size - 1} are on "
                f"{', '.join(hosts)}, and the ranks of a replica on CPUs meet in shared memory, which these have "
                f"not in common; set controller.ray.placement=pack on nodes with room for {size} ranks each, or "
                f"tensor_parallel_size=1"
            )
