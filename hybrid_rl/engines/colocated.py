"""Base of the engines in the trainer's process that hold weights of their own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from hybrid_rl.engines.guards import RolloutEngine
from hybrid_rl.resharding.handoff.base import Source
from hybrid_rl.resharding.handoff.quantised import Quantisation
from hybrid_rl.resharding.trace import Trace


@dataclass(frozen=True)
class TracedWeights:
    """An engine's live tensors (destinations), in the order of the trace that says where each of their elements comes
    from."""

    trace: Trace
    destinations: list[Tensor]


class ColocatedEngine(RolloutEngine):
    """A RolloutEngine whose own weights are written by plan from the trainer's shards.

    can_sleep: whether memory is given back. quantisation: of the weights that it holds on a grid; it takes a source of
    those. fingerprint: of all tokens so far, equal on the ranks that share an engine as long as they sample alike.
    """

    can_sleep: bool
    quantisation: Quantisation | None = None
    fingerprint: int = 0

    @property
    @abstractmethod
    def weights(self) -> TracedWeights:
        """The engine's own tensors, and where each of their elements comes from."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights while they are awake."""
        return sum(tensor.nbytes for tensor in self.weights.destinations)

    def check_adapters(self, source: Source) -> None:
        """Prove that what the engine adds to its weights itself are the adapters of a source. Raises HandoffError. An
        engine that adds nothing has nothing to prove."""
        return

    def require_room(self, tags: frozenset[str]) -> None:
        """Raise MemoryStateError if the device has too little memory for these tags to wake. An engine whose `wake` may
        break off half done says so here, before it has touched anything."""
        return
