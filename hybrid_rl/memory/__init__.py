"""Sleep and wake of whatever occupies memory, and measurement of memory in use."""

from hybrid_rl.memory.leases import Gather, Leases, Resident, Transition
from hybrid_rl.memory.probe import measure
from hybrid_rl.memory.region import Region

__all__ = ["Gather", "Leases", "Region", "Resident", "Transition", "measure"]
