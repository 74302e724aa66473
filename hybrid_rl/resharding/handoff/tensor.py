"""Handoff within one process: the engine is shown the trainer's tensors themselves, or copies from them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.handoff.base import LOCAL, Delivered, HandoffReport, Parts, Source, number_of, pull
from hybrid_rl.resharding.layout import SourceLayout, WeightLayout, named_weights
from hybrid_rl.resharding.plan import Plan

__all__ = ["HandoffReport", "TensorSource", "check_shared"]


@dataclass(eq=False)
class TensorSource(Source):
    """The trainer's weights in this process, by name; the only participant."""

    tensors: Mapping[str, Tensor]
    _layout: SourceLayout | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, module: nn.Module) -> TensorSource:
        """All parameters and buffers of a module."""
        return cls(named_weights(module))

    def layout(self) -> SourceLayout:
        """See Source: rank 0 of this host holds everything."""
        if self._layout is None:
            self._layout = SourceLayout.of(self.tensors, hosts=(socket.gethostname(),))
        return self._layout

    def weight_layout(self) -> WeightLayout:
        """See Source; cheap, for engines that read the trainer's own memory."""
        return WeightLayout.of(self.tensors.items())

    def deliver(
        self, plan: Plan, destinations: Sequence[Tensor], *, hashes: Tensor | None = None, seeds: Tensor | None = None
    ) -> Delivered:
        """See Source."""
        parts = self.held()[0]
        return pull(plan, lambda rank: parts, destinations, lambda rank: LOCAL, hashes, seeds)

    def full(self, name: str) -> Tensor:
        """See Source: the trainer's own tensor."""
        part = self.held()[0][number_of(self.layout(), name)]
        assert part is not None
        return part

    def held(self) -> dict[int, Parts]:
        """See Source. Raises HandoffError for a tensor that is not one piece of memory, or sharded."""
        scattered = [name for name, t in self.tensors.items() if isinstance(t, DTensor) or not t.is_contiguous()]
        if scattered:
            raise HandoffError(
                f"{len(scattered)} weights are sharded or not contiguous, e.g. {scattered[:3]}; use another source, or "
                f"make them contiguous"
            )
        return {0: [self.tensors[sharded.spec.name].detach() for sharded in self.layout().tensors]}


def check_shared(source: TensorSource, engine: Mapping[str, Tensor]) -> int:
    """Prove that the engine reads the source's own memory; returns the number of tensors.

    Raises HandoffError for a name that only one side has, or where storage, offset, shape, stride or dtype differ: a
    rebound `param.data`, for instance, would leave the engine with old weights.
    """
    missing = sorted(set(source.tensors) ^ set(engine))
    if missing:
        raise HandoffError(f"trainer and engine differ in {len(missing)} weights, e.g. {missing[:3]}")
    for name, tensor in source.tensors.items():
        mine, theirs = (
            (t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in (engine[name], tensor)
        )
        if mine != theirs:
            raise HandoffError(f"weight {name!r} is not the trainer's own tensor: engine {mine}, trainer {theirs}")
    return len(engine)
