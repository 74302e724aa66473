"""What is in memory when."""

from hybrid_rl.memory.leases import Leases, Resident, Transition
from hybrid_rl.memory.probe import measure

__all__ = ["Leases", "Resident", "Transition", "measure"]
