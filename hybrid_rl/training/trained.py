"""A model with its optimizer: one update from micro-batches, and what a checkpoint holds of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.batch import Batch
from hybrid_rl.checkpoint import OPTIMIZER_FOLDER, SCALARS_FILE, read_optimizer_into
from hybrid_rl.config import OptimizerConfig, TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.models import CausalLM
from hybrid_rl.models.weights.loading import load_weights
from hybrid_rl.models.weights.saving import save_weights
from hybrid_rl.models.weights.sources import FolderSource
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.sharding.fsdp import ShardedCausalLM, accumulating
from hybrid_rl.training.optimizer import Optimizer
from hybrid_rl.training.skipped import SkippedUpdate, columns_not_finite
from hybrid_rl.training.step import loss_mask


class TrainedModel:
    """What every role that learns has."""

    def __init__(
        self,
        model: CausalLM,
        optimizer: OptimizerConfig,
        config: TrainerConfig,
        context: RankContext,
        *,
        num_optimizer_steps: int,
    ) -> None:
        self.model = model
        self._context = context
        self._config = config
        if config.model.gradient_checkpointing:
            model.enable_gradient_checkpointing()
            model.verify()  # it put the model into training mode
        self.skipped: SkippedUpdate | None = None  # the last update that was
        self.optimizer = Optimizer(model.module, optimizer, num_optimizer_steps=num_optimizer_steps)

    def _step(
        self, batch: Batch, micro_batches: Sequence[Sequence[int]], loss_of: Callable[[Sequence[int]], Tensor]
    ) -> tuple[float, bool]:
        """One update of the weights. loss_of: this rank's part of the loss from the samples of a micro-batch.

        Returns the gradient norm and whether the weights were updated; where not, `skipped` says why. The host waits
        for the device once, for the norm: while one micro-batch is computed, it prepares the next.
        """
        self.optimizer.clear()  # of what an update that was broken off left behind
        losses = []
        for index, rows in enumerate(micro_batches):
            mark_progress()
            with accumulating(self.model, is_last=index == len(micro_batches) - 1):
                loss = loss_of(rows)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            self.optimizer.accumulate()
        norm, updated = self.optimizer.step()
        if not updated:
            self.skipped = self._why_skipped(batch, micro_batches, norm, losses)
        return norm, updated

    def _why_skipped(
        self, batch: Batch, micro_batches: Sequence[Sequence[int]], norm: float, losses: Sequence[Tensor]
    ) -> SkippedUpdate:
        """Collective; nothing of it is computed in an update that goes through."""
        mine = batch.select(torch.tensor([row for rows in micro_batches for row in rows], dtype=torch.int64))
        mask = loss_mask(mine, mask_truncated_completions=self._config.algorithm.mask_truncated_completions)
        loss = float(torch.stack(list(losses)).double().sum()) if losses else 0.0
        names = self.optimizer.names
        part = SkippedUpdate(norm, loss, *self.optimizer.not_finite, len(names), columns_not_finite(mine, mask))
        return SkippedUpdate.joined(self._context.gather(part), names)

    def save_model(self, folder: Path) -> None:
        """Write the weights and config as `from_pretrained` reads them. Collective."""
        save_weights(self.model.module, folder, self.model.dtype, is_writer=self._context.rank == 0)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What a resumed run needs beside the weights, masters included; tensors are the memory itself."""
        state = self.optimizer.state_dict()
        if isinstance(self.model, ShardedCausalLM) and self.model.dtype.itemsize < torch.float32.itemsize:
            # The shards are the masters, which the saved weights are rounded from.
            state["master"] = {name: p for name, p in self.model.module.named_parameters() if p.requires_grad}
        return state

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take weights and optimizer state of a checkpoint, into the memory that is there.

        Raises CheckpointError where they are damaged or of another model.
        """
        try:
            load_weights(self.model.module, FolderSource(str(folder)), self.model.device)
        except ModelError as error:
            raise CheckpointError(f"cannot resume from {folder}: {error}") from error
        state = read_optimizer_into(folder, self.optimizer_state())
        if isinstance(self.model, ShardedCausalLM):
            state["master"] = {}  # the shards, which hold them now
        try:
            self._restore(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            path = folder / OPTIMIZER_FOLDER / SCALARS_FILE
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Continue from an optimizer state that was read."""
        self.optimizer.load_state_dict(state)
