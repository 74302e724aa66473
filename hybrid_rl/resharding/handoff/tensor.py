"""Handoff within one process: the engine is shown the trainer's tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hybrid_rl.errors import HandoffError
from hybrid_rl.resharding.layout import WeightLayout, named_weights


@dataclass(frozen=True)
class TensorSource:
    """The trainer's weights in this process, by name."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> TensorSource:
        """All parameters and buffers of a module."""
        return cls(named_weights(module))

    def layout(self) -> WeightLayout:
        """Names, shapes and dtypes."""
        return WeightLayout.of(self.tensors.items())


@dataclass(frozen=True)
class HandoffReport:
    """What one handoff did. num_bytes: bytes written; num_tensors: tensors checked or written."""

    version: int
    num_bytes: int
    num_tensors: int
    seconds: float


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
