"""The actor: the policy that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybrid_rl.algos import Algorithm
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.metrics import MetricSums
from hybrid_rl.models import CausalLM, load_model
from hybrid_rl.workers.optimizer import Optimizer
from hybrid_rl.workers.plan import Plan, make_plan
from hybrid_rl.workers.step import Counts, batch_logprobs, loss_mask, micro_batch_loss, mismatch_metrics

# On a CPU larger micro-batches gain 5 % of time at most and take up to 40 % more memory (128 x 4 and 256 x 8 layers); a
# GPU wants more tokens at once.
TOKENS_PER_MICRO_BATCH = {"cpu": 4096}


class Actor:
    """A model, its optimizer, and the updates of one training step."""

    def __init__(
        self, model: CausalLM, algorithm: Algorithm, config: TrainerConfig, *, num_optimizer_steps: int
    ) -> None:
        self.model = model
        self._algorithm = algorithm
        self._config = config
        if config.model.gradient_checkpointing:
            model.enable_gradient_checkpointing()
            model.verify()  # once more: it put the model into training mode
        self.optimizer = Optimizer(model.module, config.optimizer, num_optimizer_steps=num_optimizer_steps)

    def plan(self, batch: Batch, step: int) -> Plan:
        """The one plan of this batch."""
        optimizer = self._config.optimizer
        cap = optimizer.tokens_per_micro_batch
        if cap is None:
            longest = int((batch["prompt_ids"].lengths + batch["completion_ids"].lengths).max())
            cap = max(TOKENS_PER_MICRO_BATCH.get(self.model.device.type, 16384), longest)
        return make_plan(
            batch,
            prompts_per_mini_batch=optimizer.prompts_per_mini_batch or self._config.data.prompts_per_step,
            tokens_per_micro_batch=cap,
            seed=self._config.seed + step,
        )

    def logprobs(self, batch: Batch, plan: Plan) -> Jagged:
        """ln p of the completion tokens under the present weights."""
        micro_batches = [micro for mini in plan for micro in mini]
        return batch_logprobs(self.model, batch, micro_batches, self._config.rollout.temperature)

    @torch.enable_grad()
    def update(self, batch: Batch, plan: Plan) -> dict[str, float]:
        """All optimizer steps of a training step; metrics over all of them."""
        sums = MetricSums()
        if "old_logprobs" in batch and self._config.algorithm.old_logprobs == "recompute":
            sums.merge(self._mismatch(batch, batch["old_logprobs"].values))
        for iteration in range(self._config.algorithm.num_iterations):
            for index, micro_batches in enumerate(plan):
                untouched = iteration == 0 and index == 0 and self._config.algorithm.old_logprobs != "recompute"
                sums.merge(self._optimizer_step(batch, micro_batches, compare=untouched))
        return sums.result()

    def _optimizer_step(self, batch: Batch, micro_batches: list[list[int]], *, compare: bool) -> MetricSums:
        """One update from the samples of one mini-batch. compare: the weights are still those of the rollout."""
        config = self._config
        self.optimizer.clear()  # of what an update that was broken off left behind
        sums = MetricSums()
        counts = Counts.of(batch.select([row for micro in micro_batches for row in micro]), config.algorithm)
        learning_rate = self.optimizer.learning_rate
        total = 0.0
        for rows in micro_batches:
            micro = batch.select(rows)
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
        sums.mean("loss", total, 1)
        sums.mean("grad_norm", norm, 1)
        sums.mean("learning_rate", learning_rate, 1)
        sums.total("skipped_updates", 0 if updated else 1)
        return sums

    def _mismatch(self, batch: Batch, logprobs: torch.Tensor) -> MetricSums:
        mask = loss_mask(batch, mask_truncated_completions=False)
        return mismatch_metrics(logprobs, batch["rollout_logprobs"].values, mask)

    def save_model(self, folder: Path) -> None:
        """Write the weights and config as `from_pretrained` reads them."""
        self.model.module.save_pretrained(folder)

    @torch.no_grad()
    def load(self, folder: Path, optimizer: Mapping[str, Any]) -> None:
        """Take weights and optimizer state of a checkpoint, into the memory that is there.

        Raises CheckpointError, before anything is changed, where they are damaged or of another model.
        """
        try:
            stored = load_model(str(folder), dtype=str(self.model.dtype).removeprefix("torch."))
        except ModelError as error:
            raise CheckpointError(f"cannot resume from {folder}: {error}") from error
        theirs = dict(stored.named_parameters()) | dict(stored.named_buffers())
        mine = dict(self.model.module.named_parameters()) | dict(self.model.module.named_buffers())
        differing = [n for n, t in mine.items() if n not in theirs or theirs[n].shape != t.shape] + [
            *theirs.keys() - mine
        ]
        if differing:
            raise CheckpointError(
                f"{folder} is of another model: it differs in {len(differing)} tensors, e.g. {differing[0]}"
            )
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
        self.optimizer.load_state_dict(optimizer)
