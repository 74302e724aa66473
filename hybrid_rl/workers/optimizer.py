"""AdamW with fp32 masters, its schedule, clipping, and the refusal of gradients that are not numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from hybrid_rl.config import OptimizerConfig
from hybrid_rl.errors import ConfigError, ModelError

HYPERPARAMETERS = ("betas", "eps", "weight_decay")


class Optimizer:
    """Updates a module's parameters.

    fp32 parameters are updated as they are. Others get fp32 masters and fp32 gradient accumulators, so that neither
    small updates nor small gradients are lost; the parameters are rounded copies of the masters. Weight decay applies
    to matrices only, not to biases and norms.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, *, num_optimizer_steps: int) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")
        self._shapes = [(p.shape, p.dtype) for p in self._parameters]
        self._has_masters = any(p.dtype != torch.float32 for p in self._parameters)
        self._targets = [p.detach().float().clone() if self._has_masters else p for p in self._parameters]
        matrices = [t for t in self._targets if t.dim() >= 2]
        vectors = [t for t in self._targets if t.dim() < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._max_grad_norm = config.max_grad_norm
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )
        self._schedule = get_scheduler(
            config.lr_scheduler_type,
            self._adamw,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=num_optimizer_steps,
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return self._schedule.get_last_lr()[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of masters and Adam moments."""
        moments = sum(
            value.numel() * value.element_size()
            for state in self._adamw.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        return moments + (sum(t.numel() * t.element_size() for t in self._targets) if self._has_masters else 0)

    def accumulate(self) -> None:
        """Take the gradients of one backward pass into the fp32 accumulators. Call after every micro-batch."""
        if not self._has_masters:
            return
        for parameter, target in zip(self._parameters, self._targets, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                target.grad = gradient if target.grad is None else target.grad.add_(gradient)
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients, in the order of the parameters; zeros where there is none."""
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in self._targets]

    def step(self) -> tuple[float, bool]:
        """Clip, update, advance the schedule and clear the gradients.

        Returns the gradient norm before clipping and whether the weights were updated: where the norm is not finite
        they are left alone, the moments too; the schedule advances all the same, so that its end stays where it was
        planned. Raises ModelError where parameters are no longer those that the optimizer was made for.
        """
        if [(p.shape, p.dtype) for p in self._parameters] != self._shapes:
            raise ModelError(
                "parameters changed shape or dtype since the trainer was made (resize_token_embeddings, .to(dtype)?); "
                "change the model first, then make a new Trainer"
            )
        gradients = [t.grad for t in self._targets if t.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        updated = bool(norm.isfinite())
        if updated:
            if self._max_grad_norm is not None and gradients:
                torch.nn.utils.clip_grads_with_norm_(self._targets, self._max_grad_norm, norm)
            self._adamw.step()
            if self._has_masters:
                with torch.no_grad():
                    for parameter, target in zip(self._parameters, self._targets, strict=True):
                        parameter.copy_(target)
        else:
            # The scheduler warns when it runs before any optimizer step; a skipped one is counted by the caller
            # instead.
            self._adamw._opt_called = True  # type: ignore[attr-defined]
        self._schedule.step()
        self.clear()
        return float(norm), updated

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for tensor in (*self._parameters, *self._targets):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, masters included."""
        masters = [t.clone() for t in self._targets] if self._has_masters else []
        return {"adamw": self._adamw.state_dict(), "schedule": self._schedule.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`: moments, masters and the number of optimizer steps done.

        Learning rate, schedule, betas and weight decay are those of this run's config, also where they were changed.
        """
        groups = [{name: group[name] for name in HYPERPARAMETERS} for group in self._adamw.param_groups]
        self._adamw.load_state_dict(state["adamw"])
        num_steps = state["schedule"]["last_epoch"]
        rates = [
            base * factor(num_steps)
            for base, factor in zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        ]
        for group, own, rate in zip(self._adamw.param_groups, groups, rates, strict=True):
            group.update(own, lr=rate)
        self._schedule.load_state_dict(
            {
                "last_epoch": num_steps,
                "_step_count": num_steps + 1,
                "_last_lr": rates,
                "lr_lambdas": [None] * len(rates),
            }
        )
        for target, master in zip(self._targets, state["masters"], strict=self._has_masters):
            target.copy_(master)
