"""Handoff within one process: the engine uses the trainer's tensors themselves, or copies of them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.adopt import place_of
from hybrid_rl.resharding.handoff.base import LOCAL, Delivered, Parts, Source, copy_shares, number_of
from hybrid_rl.resharding.layout import SourceLayout
from hybrid_rl.resharding.rank_plan import Plan
from hybrid_rl.weights.sources import named_weights


@dataclass(eq=False)
class TensorSource(Source):
    """The trainer's weights in this process, by name; there is no other participant."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> TensorSource:
        """Make the source of all parameters and buffers of a module."""
        return cls(named_weights(module))

    @cached_property
    def _layout(self) -> SourceLayout:  # type: ignore[override]
        """The layout in which rank 0 of this host holds everything."""
        return SourceLayout.of(self.tensors, hosts=(socket.gethostname(),))

    def deliver(self, plan: Plan, destinations: Sequence[Tensor]) -> Delivered:
        """Copy the pieces of the plan to the engine."""
        parts = self.held()[0]
        return Delivered.of(
            plan, destinations, *copy_shares(plan.shares, lambda rank: parts, destinations, lambda rank: LOCAL)
        )

    def full(self, name: str) -> Tensor:
        """Return the trainer's own tensor."""
        part = self.held()[0][number_of(self.layout(), name)]
        assert part is not None
        return part

    def held(self) -> dict[int, Parts]:
        """Return all tensors as those of rank 0. Raises HandoffError if one is sharded or not contiguous."""
        scattered = [name for name, t in self.tensors.items() if isinstance(t, DTensor) or not t.is_contiguous()]
        if scattered:
            raise HandoffError(
                f"{len(scattered)} weights are sharded or not contiguous, e.g. {scattered[:3]}; use another source, or "
                f"make them contiguous"
            )
        return {0: [self.tensors[sharded.spec.name].detach() for sharded in self.layout().tensors]}


def check_shared(source: TensorSource, engine: Mapping[str, Tensor]) -> int:
    """Prove that the engine reads the source's own memory, and return the number of tensors.

    Raises HandoffError for a name that only one side has, or if storage, offset, shape, stride or dtype differ: a
    rebound `param.data`, for instance, would leave the engine with old weights.
    """
    missing = sorted(set(source.tensors) ^ set(engine))
    if missing:
        raise HandoffError(f"trainer and engine differ in {len(missing)} weights, e.g. {missing[:3]}")
    for name, tensor in source.tensors.items():
        mine, theirs = place_of(engine[name]), place_of(tensor)
        if mine != theirs:
            raise HandoffError(f"weight {name!r} is not the trainer's own tensor: engine {mine}, trainer {theirs}")
    return len(engine)
