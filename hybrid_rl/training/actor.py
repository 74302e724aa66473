"""The actor: the policy that is trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hybrid_rl.algos import Needs
from hybrid_rl.batch import Batch, Jagged
from hybrid_rl.config import TrainerConfig
from hybrid_rl.controller import RankContext
from hybrid_rl.metrics import MetricSums
from hybrid_rl.models import CausalLM
from hybrid_rl.models.experts.balance import LoadBalance
from hybrid_rl.models.experts.router import Routers
from hybrid_rl.tensors.transfer import finish_downloads, start_download
from hybrid_rl.training.entropy import EntropyWeight
from hybrid_rl.training.extras import LearnedNumbers, prepared_column, rollout_gap, with_whole
from hybrid_rl.training.kl import KLWeight
from hybrid_rl.training.plan import Plan, micro_batch
from hybrid_rl.training.routing import router_columns
from hybrid_rl.training.scoring import batch_logprobs, distribution_columns
from hybrid_rl.training.step import Counts, Terms, micro_batch_loss
from hybrid_rl.training.trained import TrainedModel

logger = logging.getLogger("hybrid_rl")


class Actor(TrainedModel):
    """The policy with its optimizer, and the updates of one training step."""

    def __init__(
        self,
        model: CausalLM,
        config: TrainerConfig,
        context: RankContext,
        *,
        num_optimizer_steps: int,
        reference: CausalLM | None = None,
    ) -> None:
        super().__init__(model, config.optimizer, config, context, num_optimizer_steps=num_optimizer_steps)
        self._reference = reference
        self._routers = Routers(model) if Needs.ROUTER_SCORES in config.policy_loss.needs else None
        self._balance = LoadBalance.of(model, config.algorithm.router_aux_loss_coef)
        self.kl_weight = KLWeight(config.kl)
        self.entropy_weight = EntropyWeight(config)
        self._numbers = LearnedNumbers(config.policy_loss, model.device)
        self._has_told = False

    def columns(self, batch: Batch, plan: Plan) -> dict[str, Jagged]:
        """old_logprobs under the present weights or the engine's, as configured, with what the algorithm wants of the
        distribution behind them; nothing where the update needs none."""
        config = self._config
        micro_batches = [micro for mini in plan for micro in mini]
        num_top = 0
        if Needs.OLD_TOP in config.policy_loss.needs:
            num_top = config.policy_loss.num_top  # type: ignore[attr-defined]
        wants_squares = Needs.SUM_PI_SQUARED in config.advantage.needs
        columns: dict[str, Jagged] = {}
        if num_top or wants_squares:
            columns = distribution_columns(
                self.model,
                batch,
                micro_batches,
                config.rollout.temperature,
                num_top=num_top,
                wants_squares=wants_squares,
            )
        elif self._routers is None and config.algorithm.old_logprobs == "recompute":
            columns["old_logprobs"] = batch_logprobs(self.model, batch, micro_batches, config.rollout.temperature)
        if self._routers is not None:
            columns |= router_columns(self.model, self._routers, batch, micro_batches, config.rollout.temperature)
        if config.algorithm.old_logprobs == "rollout":
            columns["old_logprobs"] = batch["rollout_logprobs"]
        return columns

    @torch.enable_grad()
    def update(self, batch: Batch, plan: Plan, version: int) -> MetricSums:
        """All optimizer steps of a training step; this rank's part of the metrics over all of them. version: of the
        weights as they are before the first of them."""
        config, sums = self._config, MetricSums()
        changed = start_download(self.optimizer.take_over())
        recomputed = config.algorithm.old_logprobs == "recompute" and "old_logprobs" in batch
        if recomputed:
            sums.merge(rollout_gap(batch, batch["old_logprobs"].values, config, self._context, version))
        counts = self._counts(batch, plan)
        prepared = prepared_column(batch, plan, config, self._context, version)
        if prepared is not None:
            batch = batch.with_columns(prepared=prepared)
        terms = Terms(config, self.kl_weight.beta, version, self._numbers.on_device, self._reference, self._routers)
        first: torch.Tensor | None = None  # logprobs of the first mini-batch, under the weights of the rollout
        for iteration in range(config.algorithm.num_iterations):
            for index, micro_batches in enumerate(plan):
                step_sums, logprobs = self._optimizer_step(batch, micro_batches, counts[index], terms)
                sums.merge(step_sums)
                if iteration == 0 and index == 0 and not recomputed:
                    first = start_download(logprobs)
        numbers = start_download(sums.unread())
        finish_downloads(self.model.device)
        sums.settle(numbers)
        self._tell_changed(changed)
        if first is not None:
            rows = [row for micro in plan[0] for row in micro]
            mine = batch.select(torch.tensor(rows, dtype=torch.int64))
            sums.merge(rollout_gap(mine, first, config, self._context, version))
        if "teacher_logprobs" in batch:
            on = batch["completion_mask"].values
            gap = (batch["old_logprobs"].values - batch["teacher_logprobs"].values)[on]
            sums.mean("teacher_kl", float(gap.double().sum()), len(gap))
        sums.merge(self.kl_weight.follow(batch, sums, self._context))
        return sums

    def _tell_changed(self, changed: torch.Tensor) -> None:
        """Warn, once, of weights that a user has loaded into the module since the last step: bool [P], which."""
        names = [name for name, is_changed in zip(self.optimizer.names, changed.tolist(), strict=False) if is_changed]
        if names and not self._has_told:
            logger.warning(
                "%d of %d parameters were changed by hand since the last update (first %s): training goes on from "
                "their values, with the optimizer's moments as they are (said once)",
                *(len(names), len(self.optimizer.names), names[0]),
            )
            self._has_told = True

    def _counts(self, batch: Batch, plan: Plan) -> list[Counts]:
        """Denominators of each mini-batch, over all ranks."""
        rows = [[row for micro in mini for row in micro] for mini in plan]
        mine = [Counts.of(batch.select(torch.tensor(r, dtype=torch.int64)), self._config.algorithm) for r in rows]
        return [sum(parts, Counts()) for parts in zip(*self._context.gather(mine), strict=True)]

    def _optimizer_step(
        self, batch: Batch, micro_batches: list[list[int]], counts: Counts, terms: Terms
    ) -> tuple[MetricSums, torch.Tensor]:
        """One update from the samples of one mini-batch, and the logprobs of their tokens before it, float32 [M] in the
        order of the micro-batches."""
        sums = MetricSums()
        learning_rate = self.optimizer.learning_rate
        before = [torch.zeros(0, device=self.model.device)]
        self._numbers.clear()
        terms = replace(terms, balance=self._balance, entropy_coef=self.entropy_weight.applied)
        if len(micro_batches) > 1 or self._context.num_ranks > 1:
            terms = with_whole(self.model, batch, micro_batches, terms, self._context)

        def loss_of(rows: Sequence[int]) -> torch.Tensor:
            micro = micro_batch(batch, rows, self.model.idle_token)
            loss, stats, logprobs = micro_batch_loss(self.model, micro, terms, counts)
            sums.merge(stats)
            sums.mean("loss", loss.detach(), 0)
            if rows:
                before.append(logprobs.float())
            return loss

        norm, updated = self._step(batch, micro_batches, loss_of)
        self._numbers.step(self._context, is_valid=updated and counts.num_tokens > 0)
        # Of the whole update, so counted once: its loss is the sum of all ranks' parts.
        once = int(self._context.rank == 0)
        sums.mean("loss", 0.0, once)
        if self._balance is not None:
            sums.mean("aux_loss", 0.0, once)
        if once:
            sums.mean("grad_norm", norm, 1)
            sums.mean("learning_rate", learning_rate, 1)
            sums.total("skipped_updates", 0 if updated else 1)
            sums.merge(self._numbers.metrics())
        sums.merge(self.entropy_weight.follow(sums, self._context))
        return sums, torch.cat(before)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """See TrainedModel; with what the algorithm has learned beside the model."""
        own = self.kl_weight.state_dict() | self._numbers.state_dict() | self.entropy_weight.state_dict()
        return super().optimizer_state() | {"algorithm": own}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self.kl_weight.load_state_dict(state["algorithm"])
        self.entropy_weight.load_state_dict(state["algorithm"])
        self._numbers.load_state_dict(state["algorithm"])
