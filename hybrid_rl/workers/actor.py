"""The actor: the policy that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybrid_rl.algos import Algorithm
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.checkpoint import read_optimizer_into
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext, mark_progress
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.metrics import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.models.weights.loading import load_weights
from hybrid_rl.models.weights.saving import save_weights
from hybrid_rl.models.weights.sources import FolderSource
from hybrid_rl.workers.fsdp import ShardedCausalLM, accumulating
from hybrid_rl.workers.optimizer import Optimizer
from hybrid_rl.workers.plan import Plan, micro_batch
from hybrid_rl.workers.step import Counts, batch_logprobs, loss_mask, micro_batch_loss, mismatch_metrics


class Actor:
    """A model, its optimizer, and the updates of one training step."""

    def __init__(
        self,
        model: CausalLM,
        algorithm: Algorithm,
        config: TrainerConfig,
        context: RankContext,
        *,
        num_optimizer_steps: int,
    ) -> None:
        self.model = model
        self._context = context
        self._algorithm = algorithm
        self._config = config
        if config.model.gradient_checkpointing:
            model.enable_gradient_checkpointing()
            model.verify()  # once more: it put the model into training mode
        self.optimizer = Optimizer(model.module, config.optimizer, num_optimizer_steps=num_optimizer_steps)

    def logprobs(self, batch: Batch, plan: Plan) -> Jagged:
        """ln p of the completion tokens under the present weights."""
        micro_batches = [micro for mini in plan for micro in mini]
        return batch_logprobs(self.model, batch, micro_batches, self._config.rollout.temperature)

    @torch.enable_grad()
    def update(self, batch: Batch, plan: Plan) -> MetricSums:
        """All optimizer steps of a training step; this rank's part of the metrics over all of them."""
        sums = MetricSums()
        if "old_logprobs" in batch and self._config.algorithm.old_logprobs == "recompute":
            sums.merge(self._mismatch(batch, batch["old_logprobs"].values))
        counts = self._counts(batch, plan)
        for iteration in range(self._config.algorithm.num_iterations):
            for index, micro_batches in enumerate(plan):
                untouched = iteration == 0 and index == 0 and self._config.algorithm.old_logprobs != "recompute"
                sums.merge(self._optimizer_step(batch, micro_batches, counts[index], compare=untouched))
        return sums

    def _counts(self, batch: Batch, plan: Plan) -> list[Counts]:
        """Denominators of each mini-batch, over all ranks."""
        rows = [[row for micro in mini for row in micro] for mini in plan]
        mine = [Counts.of(batch.select(torch.tensor(r, dtype=torch.int64)), self._config.algorithm) for r in rows]
        return [sum(parts, Counts(0, 0)) for parts in zip(*self._context.gather(mine), strict=True)]

    def _optimizer_step(
        self, batch: Batch, micro_batches: list[list[int]], counts: Counts, *, compare: bool
    ) -> MetricSums:
        """One update from the samples of one mini-batch. compare: the weights are still those of the rollout."""
        config = self._config
        self.optimizer.clear()  # of what an update that was broken off left behind
        sums = MetricSums()
        learning_rate = self.optimizer.learning_rate
        total = 0.0
        for index, rows in enumerate(micro_batches):
            mark_progress()
            micro = micro_batch(batch, rows)
            with accumulating(self.model, is_last=index == len(micro_batches) - 1):
                loss, stats, logprobs = micro_batch_loss(
                    self.model,
                    micro,
                    self._algorithm,
                    config.algorithm,
                    counts,
                    temperature=config.rollout.temperature,
                    max_completion_length=config.rollout.max_completion_length,
                )
                loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.accumulate()
            total += float(loss.detach())
            sums.merge(stats)
            if compare:
                sums.merge(self._mismatch(micro, logprobs.float().cpu()))
        norm, updated = self.optimizer.step()
        # Of the whole update, so counted once: its loss is the sum of all ranks' parts.
        once = int(self._context.rank == 0)
        sums.mean("loss", total, once)
        if once:
            sums.mean("grad_norm", norm, 1)
            sums.mean("learning_rate", learning_rate, 1)
            sums.total("skipped_updates", 0 if updated else 1)
        return sums

    def _mismatch(self, batch: Batch, logprobs: torch.Tensor) -> MetricSums:
        mask = loss_mask(batch, mask_truncated_completions=False)
        return mismatch_metrics(logprobs, batch["rollout_logprobs"].values, mask)

    def save_model(self, folder: Path) -> None:
        """Write the weights and config as `from_pretrained` reads them. Collective."""
        save_weights(self.model.module, folder, self.model.dtype, is_writer=self._context.rank == 0)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What a resumed run needs beside the weights, masters included; tensors are the memory itself."""
        state = self.optimizer.state_dict()
        if isinstance(self.model, ShardedCausalLM) and self.model.dtype != torch.float32:
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
        self.optimizer.load_state_dict(state)
