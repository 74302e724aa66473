"""Which engines there are, and whether models run packed rows in training."""

from __future__ import annotations

from typing import Any

ENGINES = (
    "inplace (embedded, any machine), vllm (in the trainer's processes) or hf (the model's own forward, in training "
    "too: for linear attention, convolutions, state spaces and other layers that cannot be packed; slower)"
)


class Packing:
    """A part of TrainerConfig."""

    rollout: Any
    model: Any

    @property
    def is_packed(self) -> bool:
        """Whether models run packed rows in training; which engine generates is another matter."""
        return bool(self.rollout.is_packed and self.model.attention != "unpacked")
