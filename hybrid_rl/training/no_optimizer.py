"""The place of an optimizer in a rank that only generates."""

from __future__ import annotations

from torch import Tensor, nn

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.training.optimizer import Optimizer


class NoOptimizer(Optimizer):
    """Takes no memory and updates nothing. Parameters may be frozen."""

    def __init__(self, module: nn.Module, config: OptimizerConfig, *, num_optimizer_steps: int) -> None:
        self._parameters = dict(module.named_parameters())
        self._shapes = {name: (p.shape, p.dtype) for name, p in self._parameters.items()}
        self._has_masters = False
        self.names, self.not_finite = [], ([], [])

    @property
    def learning_rate(self) -> float:
        """0: nothing is learned."""
        return 0.0

    def tensors(self) -> list[Tensor]:
        """Return nothing: it holds none."""
        return []
