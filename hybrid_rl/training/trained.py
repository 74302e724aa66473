"""A model with its optimizer: the parts that every update shares, and those that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.batch import Batch
from hybrid_rl.checkpoint.reading import OPTIMIZER_FOLDER, SCALARS_FILE, read_optimizer_into
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.memory.shortage import Halvings
from hybrid_rl.memory.transfer import finish_downloads, start_download
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.process import progress
from hybrid_rl.process.files import Sink
from hybrid_rl.process.heartbeat import mark_progress
from hybrid_rl.training.batch_plan import micro_batch, sample_rows
from hybrid_rl.training.optimizer import Optimizer
from hybrid_rl.training.sharding.fsdp import ShardedCausalLM
from hybrid_rl.training.skipped import SkippedUpdate, columns_not_finite
from hybrid_rl.training.spec import loss_mask


class TrainedModel:
    """The base of every role that learns."""

    def __init__(
        self,
        model: CausalLM,
        config: TrainerConfig,
        context: RankContext,
        *,
        num_optimizer_steps: int,
        optimizer: type[Optimizer] = Optimizer,
    ) -> None:
        self.model = model
        self._context = context
        self._masks_truncated = config.algorithm.mask_truncated_completions
        self._num_iterations = config.algorithm.num_iterations
        if config.model.gradient_checkpointing:
            model.enable_gradient_checkpointing()
            model.verify()  # it put the model into training mode
        self.skipped: SkippedUpdate | None = None  # the last update that was
        self.halvings = Halvings(is_alone=context.num_ranks == 1)
        self.optimizer = optimizer(model.module, config.optimizer, num_optimizer_steps=num_optimizer_steps)

    def _cut(self, batch: Batch, micro_batches: Sequence[Sequence[int]]) -> Iterator[tuple[Batch, bool]]:
        """Yield the micro-batches of one optimizer step, and whether each is the last; gradients begin at zero.

        The host waits for the device once per optimizer step, for the gradient norm (before the first of a training
        step for its logprobs too): while one micro-batch is computed, it prepares the next.
        """
        self.optimizer.clear()  # an update that failed may have left some
        for index, rows in enumerate(micro_batches):
            mark_progress()
            yield micro_batch(batch, rows, self.model.idle_token), index == len(micro_batches) - 1

    def _take_step(
        self, batch: Batch, micro_batches: Sequence[Sequence[int]], losses: Sequence[Tensor], *, prefix: str, loss: str
    ) -> tuple[bool, MetricSums]:
        """Update the weights from the accumulated gradients; if they are not finite, `skipped` says why. Collective.

        losses: this rank's part of the loss from each micro-batch, detached; loss: the name of its metric, prefix: that
        of the others. Returns whether the weights were updated, and the metrics.
        """
        learning_rate = self.optimizer.learning_rate
        norm, updated = self.optimizer.step()
        progress.advance()
        if not updated:
            self.skipped = self._why_skipped(batch, micro_batches, norm, losses)
        sums, once = MetricSums(), int(self._context.data_rank == 0)
        for part in losses:
            sums.mean(prefix + loss, part, 0)
        # Of the whole update, so counted once: its loss is the sum of all ranks' parts.
        sums.mean(prefix + loss, 0.0, once)
        if once:
            sums.mean(f"{prefix}grad_norm", norm, 1)
            sums.mean(f"{prefix}learning_rate", learning_rate, 1)
            sums.total(f"{prefix}skipped_updates", 0 if updated else 1)
        return updated, sums

    def _why_skipped(
        self, batch: Batch, micro_batches: Sequence[Sequence[int]], norm: float, losses: Sequence[Tensor]
    ) -> SkippedUpdate:
        """Say what was not finite in a skipped update. Collective."""
        mine = batch.select(sample_rows(micro_batches))
        mask = loss_mask(mine, mask_truncated_completions=self._masks_truncated)
        loss = float(torch.stack(list(losses)).double().sum()) if losses else 0.0
        names, columns = self.optimizer.names, columns_not_finite(mine, mask)
        if not self._context.is_data_leader:  # another rank reports the same samples
            loss, columns = 0.0, {}
        part = SkippedUpdate(norm, loss, *self.optimizer.not_finite, len(names), columns)
        return SkippedUpdate.joined(self._context.gather(part), names)

    def _read(self, sums: MetricSums) -> None:
        """Read the metrics that are still on the device, in one copy; this waits for all other downloads too."""
        numbers = start_download(sums.unread())
        finish_downloads(self.model.device)
        sums.settle(numbers)

    def save_model(self, folder: Path, base: Mapping[str, Any] | None = None, sink: Sink | None = None) -> None:
        """Write the weights and config as `from_pretrained` reads them; of a model with adapters only those, as peft
        reads them. base: where the rest is (`keep_base`). sink: takes the tensors of each file instead of having them
        written. Collective."""
        path = None if base is None else base["path"]
        self.model.weights.save(folder, self.model.dtype, path, self._context.rank == 0, sink)

    def saved_bytes(self) -> int:
        """Return the bytes of the files that `save_model` writes."""
        return sum(parameter.numel() for parameter in self.model.weights.stored()) * self.model.dtype.itemsize

    def save_merged(self, folder: Path) -> None:
        """Write a model with adapters as one without, which computes the same. Collective."""
        self.model.weights.save_merged(folder, self.model.dtype, is_writer=self._context.rank == 0)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return what a resumed run needs besides the weights, masters included; tensors are the memory itself."""
        state = self.optimizer.state_dict()
        if isinstance(self.model, ShardedCausalLM) and self.model.dtype.itemsize < torch.float32.itemsize:
            # The shards are the masters, which the saved weights are rounded from.
            state["master"] = {name: p for name, p in self.model.module.named_parameters() if p.requires_grad}
        return state

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take weights and optimizer state of a checkpoint, into the memory that is there.

        Raises CheckpointError if they are damaged or of another model.
        """
        try:
            self.model.weights.load(folder, self.model.device)
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
