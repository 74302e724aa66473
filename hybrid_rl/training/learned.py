"""Numbers that a policy loss learns besides the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algos import PolicyObjective
from hybrid_rl.controller import RankContext
from hybrid_rl.metrics.metric_sums import MetricSums


class LearnedNumbers:
    """Numbers that a policy loss learns besides the model: the same on every rank, updated by Adam on the CPU.

    device: the model's. parameters: float64 [P], None if the loss learns none; on_device: the same numbers there, what
    losses are given and get their gradient from.
    """

    def __init__(self, objective: PolicyObjective, device: torch.device | str = "cpu") -> None:
        self.parameters: Tensor | None = None
        self.on_device: Tensor | None = None
        if objective.initial_parameters:
            self.parameters = torch.tensor(objective.initial_parameters, dtype=torch.float64).requires_grad_()
            self._adam = torch.optim.Adam([self.parameters], lr=objective.parameter_learning_rate)
            is_here = torch.device(device).type == "cpu"
            self.on_device = self.parameters if is_here else self.parameters.detach().to(device).requires_grad_()

    def clear(self) -> None:
        """Forget gradients, which an update that failed may have left."""
        if self.parameters is not None and self.on_device is not None:
            self.parameters.grad = self.on_device.grad = None

    def step(self, context: RankContext, *, is_valid: bool) -> None:
        """Update once from the gradients of all ranks' micro-batches. Collective. is_valid: False drops them, and
        leaves the numbers as they are: without a token in the loss Adam's momentum would still move them."""
        if self.parameters is None or self.on_device is None:
            return
        mine = torch.zeros_like(self.parameters) if self.on_device.grad is None else self.on_device.grad.cpu()
        total = torch.stack(context.data_gather(mine)).sum(0)
        if is_valid and bool(total.isfinite().all()):
            self.parameters.grad = total
            self._adam.step()
            self._send()
        self.clear()

    @torch.no_grad()
    def _send(self) -> None:
        if self.on_device is not None and self.parameters is not None and self.on_device is not self.parameters:
            self.on_device.copy_(self.parameters)

    def metrics(self) -> MetricSums:
        """Report their present values."""
        sums = MetricSums()
        for index, value in enumerate([] if self.parameters is None else self.parameters.tolist()):
            sums.mean(f"policy_loss/parameter_{index}", value, 1)
        return sums

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain numbers."""
        if self.parameters is None:
            return {}
        state = self._adam.state_dict()["state"]
        moments = {name: value.tolist() for name, value in state[0].items()} if state else {}
        return {"parameters": self.parameters.tolist(), "adam": moments}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        if self.parameters is None:
            return
        self.parameters.copy_(torch.tensor(state["parameters"], dtype=torch.float64))
        for name, value in state["adam"].items():
            dtype = torch.float32 if name == "step" else torch.float64
            self._adam.state[self.parameters][name] = torch.tensor(value, dtype=dtype)
        self._send()
