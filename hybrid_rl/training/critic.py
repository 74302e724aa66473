"""The critic: a separate model that estimates, before every token of a completion, the return that will follow."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.algos.value_losses import ValueFit, clipped_value_loss, value_clipped
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import OptimizerConfig, TrainerConfig, ValueHeadConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.errors import CheckpointError, ModelError
from hybrid_rl.memory.shortage import Cut
from hybrid_rl.memory.transfer import upload
from hybrid_rl.metrics.metric_sums import MetricSums
from hybrid_rl.models import CausalLM, check_tokenizer
from hybrid_rl.models.recipe import ModelRecipe
from hybrid_rl.process import progress
from hybrid_rl.training.batch_plan import Plan, row_size, sample_rows
from hybrid_rl.training.scoring import token_column
from hybrid_rl.training.sharding.build import build_critic
from hybrid_rl.training.sharding.fsdp import accumulating
from hybrid_rl.training.spec import loss_mask
from hybrid_rl.training.trained import TrainedModel
from hybrid_rl.weights.boxes import local_tensor


def _own_optimizer(config: TrainerConfig, options: ValueHeadConfig) -> OptimizerConfig:
    return dataclasses.replace(config.optimizer, learning_rate=options.critic_learning_rate)


class Critic(TrainedModel):
    """A value model, its optimizer, and its updates of one training step.

    model: what it is made from (`build_critic`): the policy, a saved critic or a reward model. Collective if there
    are several ranks. Raises ModelError or ConfigError if no critic can be made from it.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelRecipe,
        config: TrainerConfig,
        context: RankContext,
        *,
        num_optimizer_steps: int,
        options: ValueHeadConfig,
    ) -> None:
        built = build_critic(model, config, context)
        built.verify()
        own_config = dataclasses.replace(config, optimizer=_own_optimizer(config, options))
        super().__init__(built, own_config, context, num_optimizer_steps=num_optimizer_steps)
        self._clip = options.cliprange_value
        self._has_begun = False

    def reconfigure(self, config: TrainerConfig, num_optimizer_steps: int, options: ValueHeadConfig) -> None:
        """Go on with other numbers in the loss and the optimizer."""
        self._clip = options.cliprange_value
        self.optimizer.reconfigure(_own_optimizer(config, options), num_optimizer_steps)

    def check(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        """Raise ModelError if it cannot take the policy's tokens, or sequences of up to max_length of them."""
        check_tokenizer(tokenizer, self.model.module)
        limit = self.model.length_limit
        if limit is not None and max_length > limit.num_tokens:
            raise ModelError(
                f"the critic takes at most {limit.num_tokens} tokens ({limit.why}), but prompt and completion may take "
                f"{max_length}; lower max_prompt_length or max_completion_length, or give another critic_path"
            )

    def values(self, batch: Batch, plan: Plan) -> Jagged:
        """Compute the value before each completion token, float32, aligned with completion_ids: the critic's estimate
        from the prompt and the completion tokens before it. Collective."""
        micro_batches = [micro for mini in plan for micro in mini]
        return token_column(batch, micro_batches, lambda micro: micro_batch_values(self.model, micro), self.halvings)

    @torch.enable_grad()
    def update(self, batch: Batch, plan: Plan) -> MetricSums:
        """Take all optimizer steps of a training step, on the columns values (before any of them) and returns; returns
        this rank's part of the metrics over all of them. Collective."""
        mask = self._mask(batch)
        per_token = batch["completion_ids"].with_values(mask)
        mine = [int(per_token.select(sample_rows(mini)).values.sum()) for mini in plan]
        counts = [sum(parts) for parts in zip(*self._context.data_gather(mine), strict=True)]
        sums = value_metrics(batch, mask, self._context)
        self._begin_at_the_mean(batch["returns"].values[mask])
        progress.count(self._num_iterations * len(plan), "optimizer steps of the critic", is_common=True)
        for _ in range(self._num_iterations):
            for micro_batches, num_tokens in zip(plan, counts, strict=True):
                for attempt in self.halvings.attempts(micro_batches, partial(row_size, batch)):
                    with attempt as cut:
                        step, losses = self._gradients(batch, num_tokens, cut)
                step.merge(self._take_step(batch, micro_batches, losses, prefix="critic/", loss="value_loss")[1])
                sums.merge(step)
        self._read(sums)
        return sums

    def _gradients(self, batch: Batch, num_tokens: int, cut: Cut) -> tuple[MetricSums, list[Tensor]]:
        """Accumulate the gradients of one optimizer step. num_tokens: with a target, of all ranks; cut: parts of its
        micro-batches. Returns the metrics, and the loss of each part."""
        step, losses = MetricSums(), []
        for micro, is_last in self._cut(batch, [rows for _, rows in cut]):
            with accumulating(self.model, is_last=is_last):
                loss, stats = micro_batch_value_loss(self.model, micro, self._mask(micro), self._clip, num_tokens)
                loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.accumulate()
            step.merge(stats)
            losses.append(loss.detach())
        return step, losses

    def _begin_at_the_mean(self, returns: Tensor) -> None:
        """Give a head that is still zero the mean return of all ranks as its bias: what is left to learn is how states
        differ, which the first updates would otherwise give up for the mean. Collective."""
        if self._has_begun:
            return
        head = self.model.head
        is_zero = not any(bool(local_tensor(parameter).any()) for parameter in head.parameters())
        mine = (float(returns.double().sum()), len(returns), is_zero)
        totals, counts, are_zero = zip(*self._context.data_gather(mine), strict=True)
        self._has_begun = sum(counts) > 0  # a step without a return has no mean to begin at
        if head.bias is not None and all(are_zero) and sum(counts):
            self.optimizer.fill(head.bias, sum(totals) / sum(counts))

    def _mask(self, batch: Batch) -> Tensor:
        """Find the tokens with a target: those of the policy's loss. A sample without a reward teaches nothing."""
        return loss_mask(batch, mask_truncated_completions=self._masks_truncated)

    def load(self, folder: Path) -> None:
        """Take weights and optimizer state from a folder that `save_model` wrote to, as `TrainedModel.load` does."""
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} does not exist: the checkpoint is of a run without a critic; start from its weights "
                f"(model.path) instead of resuming it"
            )
        super().load(folder)


def micro_batch_values(model: CausalLM, batch: Batch) -> Tensor:
    """Compute the values before the completion tokens of a micro-batch, [M] as in completion_ids; differentiable."""
    return model.row_values(model.row_of(batch["prompt_ids"], batch["completion_ids"]))


def micro_batch_value_loss(
    model: CausalLM, batch: Batch, mask: Tensor, clip: float | None, num_tokens: int
) -> tuple[Tensor, MetricSums]:
    """Compute a micro-batch's part of its mini-batch's value loss, a mean over tokens: a scalar to call backward on;
    the parts add up to the loss. mask: bool [M], tokens with a target, on the CPU; num_tokens: those of the mini-batch
    on all ranks.
    """
    values, count = micro_batch_values(model, batch), int(mask.sum())
    on, *columns = upload([mask, batch["values"].values, batch["returns"].values], values.device)
    # Without a target all three are 0, and so is the loss: a NaN would reach the gradient through any mask.
    values, old, returns = (
        torch.where(on, column.to(values.dtype), torch.zeros_like(values)) for column in (values, *columns)
    )
    losses = clipped_value_loss(values, old, returns, clip)
    sums = MetricSums()
    sums.mean("critic/clip_ratio", value_clipped(values, old, returns, clip).sum(), count)
    return losses.sum() / max(num_tokens, 1), sums


def value_metrics(batch: Batch, mask: Tensor, context: RankContext) -> MetricSums:
    """Measure how well the values that the advantages were made with fit, over the tokens with a target. Collective.

    critic/explained_variance is of all ranks' tokens, joined on every rank and reported by rank 0; left out if the
    returns are all equal.
    """
    values, returns = (batch[name].values for name in ("values", "returns"))
    chosen = returns[mask]
    sums = MetricSums()
    sums.mean("critic/value_mean", float(values[mask].double().sum()), len(chosen))
    sums.mean("critic/return_mean", float(chosen.double().sum()), len(chosen))
    extremes = [float(chosen.min()), float(chosen.max())] if len(chosen) else []
    parts = context.data_gather((ValueFit.of(values, returns, mask), extremes))
    # Equal numbers may have a variance by rounding.
    if context.data_rank == 0 and len({number for _, mine in parts for number in mine}) > 1:
        fit = sum((fit for fit, _ in parts), ValueFit())
        sums.mean("critic/explained_variance", fit.explained_variance, 1)
    return sums
